"""What several test files share."""

import pytest

from tests.engines import EngineShelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return EngineShelf(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    """A tiny engine as it is shipped, one server a file; files that need another define their own."""
    from tests.servers import make_repository, running  # here: the GPU check runs where no client of Triton may be installed

    folder = tmp_path_factory.mktemp("server")
    repository = make_repository(folder / "repository", kv_cache_memory_mb="8", num_threads="1")
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


@pytest.fixture
def client(server):
    from tests.servers import Client

    client = Client(server.grpc_address)
    yield client
    client.close()
