"""The laws of the engine, on an executor that can be computed by hand.

Alone = in a batch = chunked = prefix-cached = preempted, token for token; and when nothing is left, every page is accounted
for.
"""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from llm_runtime.block_manager import BlockManager
from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.errors import EngineError, RequestError
from llm_runtime.page_pool import PageGroup
from llm_runtime.types import FinishReason, GenerationRequest, SamplingParams, SequenceOutput
from tests.fake_executor import VOCAB, FakeExecutor, copying, expected_output, next_token

END = 0


def word_tokenizer() -> Tokenizer:
    """Token n is the text "n,"."""
    tokenizer = Tokenizer(models.WordLevel({f"{n},": n for n in range(VOCAB)}, unk_token="0,"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def make_engine(executor: FakeExecutor | None = None, **overrides) -> Engine:
    values = {
        "max_sequences": 4,
        "max_step_tokens": 64,
        "prefill_chunk_tokens": 64,
        "max_context": 100,
        "end_ids": (END,),
    } | overrides
    return Engine(executor or FakeExecutor(), word_tokenizer(), EngineConfig(**values))


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **fields) -> GenerationRequest:
    sampling = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__dataclass_fields__}
    return GenerationRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling), **fields)


class Collected:
    """All outputs of a request, joined; fails on anything after the final one."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.outputs: list[SequenceOutput] = []

    @property
    def last(self) -> SequenceOutput | None:
        return self.outputs[-1] if self.outputs else None

    def add(self, output: SequenceOutput) -> None:
        assert self.last is None or self.last.finish_reason is None, f"{output.request_id}: an output after the final one"
        self.token_ids += output.token_ids
        self.text += output.text
        self.outputs.append(output)

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None


def run(engine: Engine, now: float = 0.0, max_steps: int = 2000) -> dict[str, Collected]:
    """Step until nothing is left, checking the books after every step."""
    results: dict[str, Collected] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step(now):
            results.setdefault(output.request_id, Collected()).add(output)
        engine.blocks.check_invariants()
    assert_idle(engine)
    return results


def assert_idle(engine: Engine) -> None:
    stats = engine.stats
    assert not engine.has_work
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == engine.blocks.pools[0].num_pages


def prompts(count: int, low: int = 1, high: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def test_alone_gives_the_expected_tokens_and_text():
    engine = make_engine()
    engine.add(make_request("a", [5, 6, 7], max_tokens=5))
    result = run(engine)["a"]
    assert result.token_ids == expected_output([5, 6, 7], 5)
    assert result.text == "".join(f"{token}," for token in result.token_ids)
    assert result.reason is FinishReason.LENGTH
    assert result.last.num_prompt_tokens == 3
    assert result.last.num_output_tokens == 5


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"max_sequences": 1},
        {"prefix_caching": False},
        {"max_step_tokens": 5, "prefill_chunk_tokens": 2},
        {"max_step_tokens": 3, "prefill_chunk_tokens": 1},
        {"max_sequences": 12, "max_step_tokens": 16, "prefill_chunk_tokens": 7},
    ],
    ids=str,
)
def test_batched_and_chunked_equal_alone(overrides):
    engine = make_engine(FakeExecutor(num_pages=200), **overrides)
    wanted = prompts(12, seed=3)
    for index, prompt in enumerate(wanted):
        engine.add(make_request(str(index), prompt, max_tokens=1 + index))
    results = run(engine)
    for index, prompt in enumerate(wanted):
        assert results[str(index)].token_ids == expected_output(prompt, 1 + index)


def test_pages_too_few_preempts_and_each_output_equals_its_solo_run():
    executor = FakeExecutor(num_pages=12, page_size=4)
    engine = make_engine(executor, max_context=40)
    wanted = prompts(4, low=8, high=8, seed=5)
    for index, prompt in enumerate(wanted):
        engine.add(make_request(str(index), prompt, max_tokens=30))
    results = run(engine)
    assert engine.stats.preemptions > 0
    for index, prompt in enumerate(wanted):
        assert results[str(index)].token_ids == expected_output(prompt, 30)


def test_a_preempted_sequence_goes_ahead_of_later_arrivals():
    executor = FakeExecutor(num_pages=8, page_size=4)
    engine = make_engine(executor, max_sequences=2, max_context=32, prefix_caching=False)
    older, preempted = prompts(2, low=10, high=10)
    for name, prompt in [("older", older), ("preempted", preempted)]:
        engine.add(make_request(name, prompt, max_tokens=20))
    engine.step(0.0)
    engine.add(make_request("late", [3, 4], max_tokens=2))
    run(engine)
    assert engine.stats.preemptions == 1
    starts = [tuple(row.token_ids[:2]) for call in executor.calls for row in call if len(row.token_ids) > 1]
    assert starts == [tuple(older[:2]), tuple(preempted[:2]), tuple(preempted[:2]), (3, 4)]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_the_same_prompt_twice_gives_the_same_tokens_and_caches_at_most_all_but_one(length):
    engine = make_engine()
    prompt = prompts(1, low=length, high=length)[0]
    cached = []
    for name in ("first", "second", "third"):
        engine.add(make_request(name, prompt, max_tokens=6))
        result = run(engine)[name]
        assert result.token_ids == expected_output(prompt, 6)
        cached.append(result.last.num_cached_tokens)
    assert cached == [0] + [(length - 1) // 4 * 4] * 2
    assert engine.stats.prefix_hit_tokens == sum(cached)


def test_identical_prompts_in_one_step_are_both_right_and_a_page_is_a_hit_only_once_computed():
    engine = make_engine()
    prompt = prompts(1, low=12, high=12)[0]
    for name in "ab":
        engine.add(make_request(name, prompt, max_tokens=4))
    results = run(engine)
    assert [results[name].token_ids for name in "ab"] == [expected_output(prompt, 4)] * 2
    assert [results[name].last.num_cached_tokens for name in "ab"] == [0, 0]


def test_hits_only_within_equal_salts():
    engine = make_engine()
    prompt = prompts(1, low=13, high=13)[0]
    cached = []
    for index, salt in enumerate(["A", "B", "A", "", "", "ab"]):
        engine.add(make_request(str(index), prompt, max_tokens=1, cache_salt=salt))
        cached.append(run(engine)[str(index)].last.num_cached_tokens)
    assert cached == [0, 0, 12, 0, 12, 0]


def test_output_pages_are_hits_for_the_next_turn():
    engine = make_engine()
    prompt = prompts(1, low=6, high=6)[0]
    engine.add(make_request("first", prompt, max_tokens=10))
    answer = run(engine)["first"].token_ids
    engine.add(make_request("second", prompt + answer + [9, 9], max_tokens=3))
    result = run(engine)["second"]
    assert result.last.num_cached_tokens == 12  # 15 of 16 tokens were computed: three full pages
    assert result.token_ids == expected_output(prompt + answer + [9, 9], 3)


def test_a_collision_of_hashes_is_refused():
    engine = make_engine()
    engine.blocks._hash = lambda data: b"same"
    for index, prompt in enumerate(prompts(5, low=9, high=14, seed=1)):
        for salt in ("A", "B"):
            name = f"{index}{salt}"
            engine.add(make_request(name, prompt, max_tokens=3, cache_salt=salt))
            assert run(engine)[name].token_ids == expected_output(prompt, 3)


def test_least_recently_used_pages_are_evicted_first_and_from_the_end_of_a_prefix():
    blocks = BlockManager([PageGroup(4)], page_size=2)
    first, second = blocks.start([], 4), blocks.start([], 4)
    pages = [*first[0], *second[0]]
    entry = blocks.root("")
    chain = [entry := blocks.register([page], entry, [page, page]) for page in pages[:2]]
    other = blocks.register(pages[2:3], blocks.root("x"), [7, 7])
    blocks.release(first)
    blocks.release(second)
    assert blocks.start([], 3)[0][0] == pages[3]  # free before cached
    assert blocks.match([0, 0, 1, 1, 5], "") == chain[:1]
    assert blocks.match([7, 7, 5], "x") == [other]
    blocks.check_invariants()


@pytest.mark.parametrize("length", [99, 100, 1000])
def test_a_prompt_over_the_limit_is_refused_with_both_numbers(length):
    engine = make_engine()
    prompt = [3] * length
    if length == 99:
        engine.add(make_request("fits", prompt, max_tokens=5))
        result = run(engine)["fits"]
        assert (result.reason, len(result.token_ids)) == (FinishReason.LENGTH, 1)
        return
    with pytest.raises(RequestError, match=f"got {length} tokens; allowed: 1 to 99"):
        engine.add(make_request("long", prompt))
    engine.add(make_request("short", [3], max_tokens=1))
    assert run(engine)["short"].token_ids == expected_output([3], 1)


def test_a_prompt_larger_than_the_pool_is_refused_at_once():
    engine = make_engine(FakeExecutor(num_pages=3, page_size=4), max_context=50)
    with pytest.raises(RequestError, match="allowed: 1 to 11"):
        engine.add(make_request("large", [3] * 12))


def test_generation_stops_at_the_context():
    engine = make_engine(max_context=20)
    engine.add(make_request("a", [3] * 15, max_tokens=50))
    result = run(engine)["a"]
    assert (result.reason, len(result.token_ids)) == (FinishReason.LENGTH, 5)


def test_an_end_token_ends_without_text_and_ignore_eos_goes_on():
    prompt = prompts(1)[0]
    tokens = expected_output(prompt, 6)
    for ignore, reason, count in [(False, FinishReason.STOP, 3), (True, FinishReason.LENGTH, 6)]:
        engine = make_engine()
        engine.add(make_request("a", prompt, max_tokens=6, end_ids=(tokens[2],), ignore_eos=ignore))
        result = run(engine)["a"]
        assert (result.reason, len(result.token_ids)) == (reason, count)
        shown = tokens if ignore else tokens[:2]
        assert result.text == "".join(f"{token}," for token in shown)


def test_a_stop_string_over_several_tokens_is_not_shown():
    prompt = prompts(1)[0]
    tokens = expected_output(prompt, 8)
    stop = f"{tokens[2]},{tokens[3]},{str(tokens[4])[:1]}"
    engine = make_engine()
    engine.add(make_request("a", prompt, max_tokens=8, stop_strings=(stop, "never")))
    result = run(engine)["a"]
    assert result.text == f"{tokens[0]},{tokens[1]},"
    assert (result.reason, len(result.token_ids)) == (FinishReason.STOP, 5)


def test_a_stop_string_in_the_prompt_or_before_min_tokens_is_not_a_stop():
    prompt = prompts(1)[0]
    tokens = expected_output(prompt, 6)
    engine = make_engine()
    engine.add(make_request("prompt", [*prompt, 5], max_tokens=2, stop_strings=("5,",)))
    engine.add(make_request("min", prompt, max_tokens=6, min_tokens=4, stop_strings=(f"{tokens[1]},",)))
    results = run(engine)
    assert results["prompt"].reason is FinishReason.LENGTH
    assert results["min"].token_ids == tokens


def test_first_generated_text_as_stop_string_gives_empty_text():
    prompt = prompts(1)[0]
    engine = make_engine()
    engine.add(make_request("a", prompt, stop_strings=(f"{expected_output(prompt, 1)[0]},",)))
    result = run(engine)["a"]
    assert (result.text, result.reason) == ("", FinishReason.STOP)


def test_a_waiting_request_past_its_queue_deadline_is_dropped_without_a_prefill():
    executor = FakeExecutor()
    engine = make_engine(executor, max_sequences=1)
    engine.add(make_request("running", [5], max_tokens=20))
    engine.add(make_request("waiting", [6, 6, 6], queue_deadline=1.0))
    engine.step(0.5)
    ended = {output.request_id: output for output in engine.step(1.0) if output.finish_reason}
    assert ended["waiting"].queue_timed_out
    assert ended["waiting"].finish_reason is FinishReason.TIMEOUT
    assert run(engine, now=2.0)["running"].token_ids[-1] == expected_output([5], 20)[-1]
    assert all(6 not in row.token_ids for call in executor.calls for row in call)


def test_a_deadline_during_generation_ends_it_with_what_it_has():
    engine = make_engine()
    engine.add(make_request("a", [5], max_tokens=50, deadline=1.0, queue_deadline=0.5))
    for now in (0.0, 0.4, 0.9):
        engine.step(now)
    (output,) = engine.step(1.0)
    assert (output.finish_reason, output.queue_timed_out, output.num_output_tokens) == (FinishReason.TIMEOUT, False, 3)
    assert_idle(engine)


def test_cancel_running_and_waiting():
    engine = make_engine(max_sequences=1)
    engine.add(make_request("running", [5], max_tokens=50))
    engine.add(make_request("waiting", [6], max_tokens=50))
    engine.step(0.0)
    for name in ("waiting", "running", "never there"):
        engine.cancel(name)
    outputs = engine.step(0.0)
    assert {(o.request_id, o.finish_reason) for o in outputs} == {(n, FinishReason.CANCELLED) for n in ("running", "waiting")}
    assert_idle(engine)


def test_a_failing_executor_ends_every_request_with_its_message():
    engine = make_engine(FakeExecutor(fail_at=2), max_sequences=2)
    for name in "abc":
        engine.add(make_request(name, [5]))
    engine.step(0.0)
    engine.step(0.0)
    with pytest.raises(EngineError, match="caught fire"):
        engine.step(0.0)
    outputs = engine.fail_all("the device caught fire")
    assert {(o.request_id, o.finish_reason, o.error) for o in outputs} == {
        (name, FinishReason.ERROR, "the device caught fire") for name in "abc"
    }
    assert_idle(engine)


def test_a_long_prompt_holds_up_running_streams_by_at_most_one_chunk():
    executor = FakeExecutor(num_pages=64)
    engine = make_engine(executor, max_step_tokens=64, prefill_chunk_tokens=8)
    engine.add(make_request("stream", [5, 6], max_tokens=20))
    engine.step(0.0)
    engine.add(make_request("long", [7] * 60, max_tokens=1))
    while engine.has_work:
        outputs = engine.step(0.0)
        if engine.stats.running:
            assert any(output.request_id == "stream" for output in outputs)
    assert max(sum(len(row.token_ids) for row in call) for call in executor.calls) <= 8 + 1


def windowed(rule, window: int):
    """The same rule of the newest tokens alone."""
    return (lambda context: rule(context[-window:])) if window else rule


def test_a_long_sequence_takes_no_more_than_its_window_of_the_layers_that_have_one():
    executor = FakeExecutor([PageGroup(100), PageGroup(6, window=9)])
    engine = make_engine(executor, max_step_tokens=8, prefill_chunk_tokens=8, max_context=400)
    (prompt,) = prompts(1, 60, 60)
    engine.add(make_request("a", prompt, max_tokens=300))
    results: list[int] = []
    while engine.has_work:
        results += [token for output in engine.step(0.0) for token in output.token_ids]
        assert engine.stats.window_pages_used <= 5
    assert results == expected_output(prompt, 300)
    assert engine.stats.preemptions == 0
    assert (engine.stats.pages_used, engine.stats.window_pages_used) == (0, 0)


def test_a_shared_prefix_is_a_hit_as_long_as_its_window_is_there():
    executor = FakeExecutor([PageGroup(100), PageGroup(12, window=9)])
    engine = make_engine(executor, max_context=200)
    (shared,) = prompts(1, 40, 40)
    for name, cached in (("first", 0), ("second", 40)):
        engine.add(make_request(name, [*shared, 5, 6, len(name)], max_tokens=4))
        result = run(engine)[name]
        assert result.token_ids == expected_output([*shared, 5, 6, len(name)], 4)
        assert result.last.num_cached_tokens == cached
    engine.add(make_request("other", prompts(1, 90, 90, seed=9)[0], max_tokens=4))  # goes through the window's whole pool
    run(engine)
    engine.add(make_request("third", [*shared, 9], max_tokens=4))
    result = run(engine)["third"]
    assert result.token_ids == expected_output([*shared, 9], 4)
    assert result.last.num_cached_tokens == 0


def test_a_pinned_prefix_keeps_its_window():
    executor = FakeExecutor([PageGroup(100), PageGroup(12, window=9)])
    engine = make_engine(executor, max_context=200)
    (shared,) = prompts(1, 40, 40)
    engine.pin([(tuple(shared), "")])
    assert (engine.stats.pages_used, engine.stats.window_pages_used) == (10, 2)
    engine.add(make_request("other", prompts(1, 90, 90, seed=9)[0], max_tokens=4))
    while engine.has_work:
        engine.step(0.0)
    engine.add(make_request("a", [*shared, 9], max_tokens=4))
    outputs = [output for _ in range(4) for output in engine.step(0.0)]
    assert outputs[-1].num_cached_tokens == 40
    assert [token for output in outputs for token in output.token_ids] == expected_output([*shared, 9], 4)


@pytest.mark.parametrize("windows", [(0,), (9,), (0, 9)], ids=str)
@pytest.mark.parametrize("max_draft_tokens", [0, 5])
@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_keep_the_laws(seed, max_draft_tokens, windows):
    """Arrivals, cancels, deadlines and shared prefixes at random, in a pool that is too small, with guesses and without."""
    rng = random.Random(seed)
    rule = windowed(copying if max_draft_tokens else next_token, windows[0])
    groups = [PageGroup(rng.randint(10, 20), window) for window in windows]
    engine = make_engine(
        FakeExecutor(groups, page_size=4, rule=rule),
        max_draft_tokens=max_draft_tokens,
        max_sequences=rng.randint(1, 6),
        max_step_tokens=rng.randint(6, 40),
        prefill_chunk_tokens=rng.randint(1, 40),
        max_context=40,
        prefix_caching=rng.random() < 0.8,
    )
    if max_draft_tokens:  # else it learns that in a fake executor no guess pays
        engine._speculator.cost.observe = lambda num_tokens, seconds: None
    shared = [[rng.randrange(2, VOCAB) for _ in range(12)] for _ in range(2)]
    requests: dict[str, GenerationRequest] = {}
    results: dict[str, Collected] = {}
    for now in range(120):
        if now < 60 and rng.random() < 0.5:
            prompt = rng.choice(shared)[: rng.randint(1, 12)] + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 8))]
            fields = {"cache_salt": rng.choice(["", "A"])}
            fields |= {"deadline": now + rng.randint(1, 30)} if rng.random() < 0.2 else {}
            fields |= {"queue_deadline": now + rng.randint(1, 5)} if rng.random() < 0.2 else {}
            requests[str(now)] = make_request(str(now), prompt, max_tokens=rng.randint(1, 20), **fields)
            engine.add(requests[str(now)])
        if requests and rng.random() < 0.1:
            engine.cancel(rng.choice(list(requests)))
        for output in engine.step(float(now)):
            results.setdefault(output.request_id, Collected()).add(output)
        engine.blocks.check_invariants()
    for name, result in run(engine, now=120.0).items():
        for output in result.outputs:
            results.setdefault(name, Collected()).add(output)
    assert set(results) == set(requests)
    for name, request in requests.items():
        result = results[name]
        whole = expected_output(request.prompt_ids, request.sampling.max_tokens, rule)
        assert result.token_ids == whole[: len(result.token_ids)]
        if result.reason is FinishReason.LENGTH:
            assert result.token_ids == whole
    assert engine.stats.finished.total() == len(requests)


def test_a_pinned_prefix_is_a_hit_from_the_first_request_on_and_never_evicted():
    executor = FakeExecutor(num_pages=16)
    engine = make_engine(executor, max_context=40)
    pinned = prompts(1, 14, 14, seed=8)[0]
    engine.pin([(tuple(pinned), ""), (tuple(pinned), "A")])
    assert (engine.stats.pages_used, engine.stats.generated_tokens, engine.stats.finished.total()) == (6, 0, 0)
    for round_number in range(12):  # more than the pool holds
        tail = prompts(1, 20, 20, seed=100 + round_number)[0]
        for name, prompt, salt in (("own", [*pinned, 5, round_number + 2], ""), ("other", tail, "")):
            engine.add(make_request(name, prompt, max_tokens=3, cache_salt=salt))
            found: list[int] = []
            while engine.has_work:
                for output in engine.step(0.0):
                    found += output.token_ids
                    cached = output.num_cached_tokens
                engine.blocks.check_invariants()
            assert found == expected_output(prompt, 3)
            assert cached == 12 or name == "other"
    assert engine.stats.evicted_pages > 0
    assert engine.stats.pages_used == 6


def test_pinned_prefixes_are_computed_anew_after_a_failure():
    executor = FakeExecutor(num_pages=16, fail_at=2)
    engine = make_engine(executor, max_context=40)
    pinned = prompts(1, 14, 14, seed=8)[0]
    prefixes = [(tuple(pinned), "")]
    engine.pin(prefixes)
    engine.add(make_request("a", [*pinned, 5], max_tokens=5))
    engine.step(0.0)
    with pytest.raises(EngineError):
        engine.step(0.0)
    engine.fail_all("lost")
    executor.pools[0][:] = -1
    engine.pin(prefixes)
    engine.blocks.check_invariants()
    assert engine.stats.pages_used == 3
    engine.add(make_request("b", [*pinned, 5], max_tokens=5))
    outputs = [output for _ in range(6) for output in engine.step(0.0)]
    assert outputs[-1].num_cached_tokens == 12
    assert [token for output in outputs for token in output.token_ids] == expected_output([*pinned, 5], 5)


def test_a_prefix_that_cannot_be_computed_says_so():
    engine = make_engine(FakeExecutor(num_pages=16, fail_at=1), max_context=40)
    with pytest.raises(EngineError, match="caught fire"):
        engine.pin([((5,) * 14, ""), ((6,) * 14, "")])
    assert not engine.has_work
    with pytest.raises(RequestError, match="prompt: got 60 tokens"):
        make_engine(FakeExecutor(num_pages=16), max_context=40).pin([((5,) * 60, "")])


@pytest.mark.parametrize("max_draft_tokens", [0, 4])
def test_a_static_cache_gives_the_same_tokens_from_one_region_a_sequence(max_draft_tokens):
    executor = FakeExecutor(num_pages=33, page_size=4, rule=copying)
    options = {"max_sequences": 8, "max_context": 38, "static_cache": True, "max_draft_tokens": max_draft_tokens}
    engine = make_engine(executor, **options)
    wanted = prompts(10, 4, 20, seed=5)
    for index, prompt in enumerate(wanted):
        engine.add(make_request(str(index), prompt, max_tokens=3 + index))
    found: dict[str, list[int]] = {}
    for output in engine.step(0.0):
        found.setdefault(output.request_id, []).extend(output.token_ids)
    assert engine.stats.running == 3, "of 33 pages three regions of ten can be had"
    results = run(engine)
    for index, prompt in enumerate(wanted):
        tokens = found.get(str(index), []) + results[str(index)].token_ids
        assert tokens == expected_output(prompt, 3 + index, copying)
        assert results[str(index)].last.num_cached_tokens == 0
    assert engine.stats.preemptions == 0
    for row in (row for call in executor.calls for row in call):
        first = row.page_ids[0]
        assert list(row.page_ids) == list(range(first, first + 10))
        assert first % 10 == 0


def test_with_a_static_cache_several_outputs_of_a_prompt_do_not_wait_for_one():
    engine = make_engine(FakeExecutor(num_pages=40), max_context=40, static_cache=True)
    for index in range(3):
        engine.add(make_request(f"a{index}", [5, 6, 7], max_tokens=4, **({"after": "a0"} if index else {})))
    outputs = engine.step(0.0)
    assert engine.stats.running == 3
    results = run(engine)
    for output in outputs:
        assert output.token_ids + results[output.request_id].token_ids == expected_output([5, 6, 7], 4)
