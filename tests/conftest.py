"""What several test files share."""

import pytest

from tests.engines import EngineShelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    return EngineShelf(tmp_path_factory.mktemp("engines"))
