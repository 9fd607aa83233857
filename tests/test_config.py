"""config.pbtxt's parameters: read once, checked at load, wrong ones named."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from llm_runtime.config import (
    Parameters,
    PinnedPrefix,
    check_prefixes,
    read_parameters,
    resolve_engine_dir,
    size_cache,
    size_pool,
    with_chosen_cache,
)
from llm_runtime.errors import ConfigError
from llm_runtime.page_pool import PageGroup
from tests.manifests import make_manifest, make_plan, with_plan

CONFIG = Path(__file__).parents[1] / "model_repository" / "llm" / "config.pbtxt"


def entries(**values):
    return {key: {"string_value": value} for key, value in values.items()}


@pytest.fixture
def shipped():
    return text_format.Parse(CONFIG.read_text(), model_config_pb2.ModelConfig())


def test_the_shipped_config_names_every_parameter_with_its_default(shipped, monkeypatch):
    monkeypatch.setenv("LLM_ENGINE_DIR", "/engines/x")
    texts = {key: {"string_value": entry.string_value} for key, entry in shipped.parameters.items()}
    assert set(texts) == set(Parameters.model_fields)
    assert read_parameters(texts) == Parameters(engine_dir="/engines/x")


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown parameter 'max_sequence'; did you mean 'max_sequences'"):
        read_parameters(entries(engine_dir="x", max_sequence="4"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_sequences", "0"),
        ("max_sequences", "many"),
        ("kv_cache_memory_mb", "-1"),
        ("attention", "flash"),
        ("prefix_caching", "maybe"),
        ("speculation", "medusa"),
        ("pinned_prefixes", "You are"),
        ("pinned_prefixes", '{"text": "You are"}'),
        ("pinned_prefixes", '[{"text": ""}]'),
        ("pinned_prefixes", '[{"text": "a", "salt": "b"}]'),
    ],
)
def test_a_bad_value_names_key_value_and_meaning(key, value):
    with pytest.raises(ConfigError) as refused:
        read_parameters(entries(engine_dir="x") | entries(**{key: value}))
    assert key in str(refused.value)
    assert repr(value) in str(refused.value)
    assert Parameters.model_fields[key].description in str(refused.value)


def test_a_missing_engine_dir_is_named():
    with pytest.raises(ConfigError, match="engine_dir"):
        read_parameters({})


def test_environment_is_expanded_and_a_missing_variable_named(monkeypatch):
    monkeypatch.setenv("HERE", "/somewhere")
    assert read_parameters(entries(engine_dir="${HERE}/e")).engine_dir == "/somewhere/e"
    with pytest.raises(ConfigError, match="the environment has no NOWHERE_AT_ALL"):
        read_parameters(entries(engine_dir="${NOWHERE_AT_ALL}"))


def test_a_relative_engine_dir_starts_at_the_models_folder(tmp_path):
    assert resolve_engine_dir("engine", tmp_path) == tmp_path / "engine"
    assert resolve_engine_dir("/abs", tmp_path) == Path("/abs")


def test_the_pool_is_sized_from_memory_and_bounds_the_context():
    manifest = make_manifest(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16, max_context=4096)
    page = 2 * 4 * 2 * 2 * 64 * 16
    assert manifest.page_bytes == page
    (group,), context = size_cache(Parameters(engine_dir="x", kv_cache_memory_mb=1), manifest)
    assert group == PageGroup(2**20 // page)
    assert context == min(4096, group.num_pages * 16)
    assert size_cache(Parameters(engine_dir="x", kv_cache_memory_mb=1, max_context=100), manifest) == ((group,), 100)


def windowed_manifest(*windows: int, window_table: bool = False, **facts):
    manifest = make_manifest(num_layers=len(windows), num_kv_heads=2, head_dim=64, page_size=16, max_context=4096, **facts)
    model = manifest.model.model_copy(update={"layer_windows": windows})
    return manifest.model_copy(update={"model": model, "window_table": window_table})


def test_layers_with_a_window_take_what_running_sequences_need_and_the_others_the_rest():
    manifest = windowed_manifest(*[100] * 5, 0, window_table=True)
    assert manifest.layer_groups == ((5,), (0, 1, 2, 3, 4))

    def groups(**values):
        return size_pool(Parameters(engine_dir="x", max_step_tokens=64, **values), manifest)

    layer = manifest.layer_page_bytes
    full, window = groups(kv_cache_memory_mb=64, max_sequences=32)
    assert window == PageGroup(32 * 9 + 4, window=100)
    assert 64 * 2**20 - 6 * layer < full.num_pages * layer + window.num_pages * 5 * layer <= 64 * 2**20
    few, fewer = groups(kv_cache_memory_mb=64, max_sequences=2)
    assert fewer.num_pages * 5 * layer == pytest.approx(16 * 2**20, rel=0.01), "a quarter of the memory, for prefixes"
    assert few.num_pages > full.num_pages
    assert len({group.num_pages for group in groups(kv_cache_memory_mb=4)}) == 1, "short of memory: as many of both"
    assert groups(kv_cache_memory_mb=64, kv_cache="static") == (PageGroup(64 * 2**20 // manifest.page_bytes),)
    more = groups(kv_cache_memory_mb=64, speculation="ngram", max_draft_tokens=32, pinned_prefixes=({"text": "a"},))
    assert more[1].num_pages == 33 * 11 + 4


def test_where_every_layer_has_a_window_the_context_is_not_bounded_by_the_pool():
    parameters = Parameters(engine_dir="x", kv_cache_memory_mb=1)
    groups, context = size_cache(parameters, windowed_manifest(100, 100, 60))
    assert (groups[0].window, context) == (100, 4096)
    assert groups[0].num_pages * 16 < 4096
    groups, context = size_cache(parameters, windowed_manifest(1000, 1000))
    assert context == groups[0].num_pages * 16, "it has no room for the window"


def test_engines_whose_layers_share_a_table_keep_all_pages():
    mixed = windowed_manifest(100, 0)
    assert size_pool(Parameters(engine_dir="x"), mixed) == (PageGroup(2**30 // mixed.page_bytes),)
    both = windowed_manifest(100, 0, window_table=True)
    (group,) = size_pool(Parameters(engine_dir="x"), both, draft=mixed)
    assert group.window == 0, "a draft engine reads the same tables"
    windows = size_pool(Parameters(engine_dir="x"), both, draft=windowed_manifest(0, 200, window_table=True))
    assert [group.window for group in windows] == [0, 200]


def test_quantized_pages_hold_a_scale_with_each_head_and_more_tokens():
    manifest = make_manifest(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16, max_context=4096)
    assert with_chosen_cache(Parameters(engine_dir="x"), manifest) is manifest
    chosen = with_chosen_cache(Parameters(engine_dir="x", kv_cache_dtype="int8"), manifest)
    assert (chosen.precision.kv_cache, chosen.page_bytes) == ("int8", 2 * 2 * 2 * 16 * (64 + 4))  # two scales
    assert size_cache(Parameters(engine_dir="x", kv_cache_memory_mb=1), chosen)[0] == (PageGroup(120),)


def test_pages_that_an_engine_cannot_have_are_refused():
    plan = with_plan(make_manifest(), make_plan(), kv_cache="fp8")
    assert with_chosen_cache(Parameters(engine_dir="x", kv_cache_dtype="fp8"), plan) is plan
    with pytest.raises(ConfigError, match="kv_cache_dtype int8: test keeps fp8, which is in its plan; set auto"):
        with_chosen_cache(Parameters(engine_dir="x", kv_cache_dtype="int8"), plan)
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs the fused kernel; set attention auto or fused"):
        with_chosen_cache(Parameters(engine_dir="x", kv_cache_dtype="fp8", attention="standard"), make_manifest())


def test_a_pool_too_small_for_the_context_asked_for_names_sizes_and_knobs():
    manifest = make_manifest(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16, max_context=4096)
    with pytest.raises(
        ConfigError, match=r"max_context 4096 tokens does not fit .* 512 tokens; set kv_cache_memory_mb to 8 or more"
    ):
        size_cache(Parameters(engine_dir="x", kv_cache_memory_mb=1, max_context=4096), manifest)


def test_a_pool_of_less_than_two_pages_names_the_memory_needed():
    manifest = make_manifest(num_layers=64, num_kv_heads=8, head_dim=128, page_size=64, max_context=4096)
    with pytest.raises(ConfigError, match="at least 2 are needed: set it to 64 or more"):
        size_cache(Parameters(engine_dir="x", kv_cache_memory_mb=1), manifest)


def test_a_context_over_the_engines_is_refused():
    with pytest.raises(ConfigError, match="max_context 5000 is over the engine's 4096"):
        size_cache(Parameters(engine_dir="x", max_context=5000), make_manifest(max_context=4096))


def test_pinned_prefixes_are_texts_or_texts_with_a_salt():
    text = '["You are kind.", {"text": "You are brief.", "cache_salt": "tenant"}]'
    prefixes = read_parameters(entries(engine_dir="x", pinned_prefixes=text)).pinned_prefixes
    assert prefixes == (PinnedPrefix(text="You are kind."), PinnedPrefix(text="You are brief.", cache_salt="tenant"))


@pytest.mark.parametrize(
    ("lengths", "caching", "message"),
    [
        ([40], "false", "need prefix_caching true and kv_cache paged"),
        ([40, 15], "true", r"pinned_prefixes\[1\] has 15 tokens; only whole pages, of 16 tokens"),
        ([170, 170], "true", "take 20 of the KV cache's 32 pages; allowed: half of them"),
    ],
)
def test_prefixes_that_cannot_be_pinned_are_refused(lengths, caching, message):
    parameters = read_parameters(entries(engine_dir="x", prefix_caching=caching))
    with pytest.raises(ConfigError, match=message):
        check_prefixes(parameters, lengths, 16, [PageGroup(32)])
    groups = [PageGroup(32), PageGroup(16, window=40)]
    assert check_prefixes(read_parameters(entries(engine_dir="x")), [40, 100], 16, groups) == [8, 2 + 3]


def test_a_static_cache_is_a_region_for_each_sequence():
    manifest = make_manifest(num_layers=2, num_kv_heads=2, head_dim=64, page_size=16, max_context=4096)

    def size(**values):
        return size_cache(Parameters(engine_dir="x", kv_cache="static", **values), manifest)

    assert size(kv_cache_memory_mb=8, max_sequences=4) == ((PageGroup(256),), 64 * 16)
    assert size(kv_cache_memory_mb=8, max_sequences=4, max_context=100) == ((PageGroup(256),), 100)
    with pytest.raises(
        ConfigError, match=r"does not fit the KV cache of 1024 tokens a sequence; set kv_cache_memory_mb to 16 or"
    ):
        size(kv_cache_memory_mb=8, max_sequences=4, max_context=2048)
    with pytest.raises(ConfigError, match=r"has 32 pages for max_sequences 64; at least one each .* to 2 or more"):
        size(kv_cache_memory_mb=1, max_sequences=64)
