"""The study of the engine at work: its requests, its clocks and sides, its verdicts, and what it writes."""

import gzip
import json
import math
import pathlib
import threading

import numpy as np
import pytest

import kvcache_jax as kv
from experiments.common.command import InputError
from experiments.serve import __main__ as command
from experiments.serve import compare, interference, report, sides, workload
from experiments.serve.compare import bars_of
from experiments.serve.interference import DISTURBED, IDLE
from experiments.serve.server import Server, computed_tokens
from experiments.serve.sides import CONTINUOUS, HOST, PREFIX, STATIC, TABLE, Sizes, look_up, table_of
from experiments.serve.simulate import LLAMA, MACHINES, Machine, ModelSizes, SimulatedClock
from experiments.serve.workload import Answer, Job
from tests.experiments import tiny

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ROWS, VOCAB = 2, 8
LAYERS = [kv.FullAttention(1, 4)]
SECOND = Machine("a second a token", 1e30, 2.0, 1e12)  # two FLOPs a parameter
ONE = ModelSizes("one number", 1.0, layers=0, q_heads=1, kv_heads=1, head_dim=1)
JOBS = [Job([1] * n, num_tokens, 0.0) for n, num_tokens in ((30, 3), (4, 20), (20, 3), (5, 3), (9, 2))]
SIZES = Sizes(ROWS, 64, num_blocks=8, steps_per_dispatch=4, token_budget=ROWS + 8)


def make(name, jobs, clock=None):
    """A side whose model is a table, on a clock that counts a second for every token of a step."""
    engine = SIZES.engine(look_up, table_of(VOCAB), LAYERS, True)
    return sides.make_server(name, engine, jobs, clock or SimulatedClock(SECOND, ONE, engine))


# --- requests ---


def test_traces_of_both_kinds_are_read(tmp_path):
    csv, lines = tmp_path / "a.csv", tmp_path / "b.jsonl"
    csv.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    lines.write_text('{"timestamp": 3000, "output_length": 5}\n{"timestamp": 4500, "output_length": 6}\n')
    assert workload.read_answers(csv, 2) == [Answer(0.0, 44), Answer(pytest.approx(4.314579), 109)]
    assert workload.read_answers(lines, 2) == [Answer(0.0, 5), Answer(1.5, 6)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has 0 requests, expected 1: lower --requests"),
        ("TIMESTAMP,GeneratedTokens\nnever,4\n", "cannot be read"),
        ("TIME\n4\n", "cannot be read"),
    ],
)
def test_a_trace_of_another_kind_is_refused(tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        workload.read_answers(tmp_path / "a.csv", 1)


def test_prompts_are_taken_as_they_are_and_answers_by_their_factors(tmp_path):
    for folder in ("text", "traces"):
        (tmp_path / folder).mkdir()
    with gzip.open(tmp_path / workload.benchmarks.HUMAN_EVAL, "wt") as file:
        for prompt in ("def é():", "x"):
            file.write(json.dumps({"prompt": prompt, "canonical_solution": "1"}) + "\n")
    (tmp_path / workload.TRACE).write_text(
        "TIMESTAMP,GeneratedTokens\n2023-11-16 18:15:46,10\n2023-11-16 18:15:50,1\n2023-11-16 18:15:51,7\n"
    )
    work = workload.human_eval(tmp_path, None, 3, arrivals=0.5, lengths=0.25)
    assert [bytes(job.prompt).decode() for job in work.jobs] == ["def é():", "x", "def é():"]
    assert [(job.num_tokens, job.arrival) for job in work.jobs] == [(2, 0.0), (1, 2.0), (2, 2.5)]
    assert (work.num_tokens, work.longest) == (5, 11)
    assert "conv.csv, its arrivals times 0.5, lengths of answers times 0.25" in work.source
    (tmp_path / workload.benchmarks.HUMAN_EVAL).write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"expected openai's HumanEval\.jsonl\.gz"):
        workload.human_eval(tmp_path, None, 3, 1.0, 1.0)


def test_without_data_requests_are_made_up_and_the_source_says_so():
    work = workload.few_shot(None, None, 40, 2.0, 0.5)
    assert "made-up prompts (no --data); made-up answers" in work.source
    assert len({tuple(job.prompt[:4000]) for job in work.jobs}) == 1
    assert len({tuple(job.prompt[4000:]) for job in work.jobs}) == 40
    arrivals = [job.arrival for job in work.jobs]
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0
    mean = np.mean([answer.num_tokens for answer in workload.made_up_answers(5000)])
    assert mean == pytest.approx(211, rel=0.1)  # the trace's
    own = workload.human_eval(None, None, 40, 1.0, 1.0)
    assert len({tuple(job.prompt) for job in own.jobs}) == 40


# --- clocks and machines ---


def test_a_step_takes_the_longer_of_bytes_and_flops():
    machine = Machine("m", bytes_per_s=100.0, flops_per_s=1000.0, memory=5e4)
    model = ModelSizes("m", num_params=50.0, layers=2, q_heads=4, kv_heads=1, head_dim=3)
    assert model.bytes_per_token == 2 * 2 * 1 * 3 * 2
    assert model.step_seconds(machine, 1, 0) == pytest.approx(1.0)  # 100 bytes of parameters
    assert model.step_seconds(machine, 1, 10) == pytest.approx(1.0 + 10 * 24 / 100)
    flops = 2 * 50 * 100 + 4 * 2 * 4 * 3 * 10
    assert model.step_seconds(machine, 100, 10) == pytest.approx(flops / 1000)
    assert model.num_blocks(machine, 16, share=0.5) == (25_000 - 100) // (24 * 16)
    assert LLAMA.bytes_per_token == 131_072
    two = Machine("m", 100.0, 1000.0, 5e4, num_chips=2)
    assert model.step_seconds(two, 100, 10) == pytest.approx(flops / 2000)
    assert LLAMA.num_blocks(MACHINES["v5e"], 16) == 0  # its parameters alone are as much as the memory


# --- sides ---


@pytest.mark.slow
def test_a_side_serves_every_request_to_its_length():
    """Its seconds are the tokens that went through the model, for each takes one."""
    server = make(CONTINUOUS, JOBS)
    server.turn(7)
    assert 7 <= server.num_tokens.sum() < 31 and not server.is_done
    server.turn(31)
    assert server.is_done and server.num_tokens.tolist() == [3, 20, 3, 3, 2]
    record = server.record()
    assert record["num_requests"] == 5 and record["num_tokens"] == 31
    counts = server.counts
    assert server.clock.now() == pytest.approx(computed_tokens(counts))
    prompts = sum(len(job.prompt) for job in JOBS)
    assert counts[kv.engine.Counter.CACHED_TOKENS] > 0
    assert record["hit_rate"] == counts[kv.engine.Counter.CACHED_TOKENS] / prompts
    assert (server.first_at <= server.last_at).all() and server.last_at.max() <= server.clock.now()
    assert record["transfers_per_token"] == server.num_reads / 31
    seconds, *_ = zip(*server.timeline(), strict=True)
    assert list(seconds) == sorted(seconds) and server.timeline()[-1][4] == 31


@pytest.mark.slow
def test_static_batches_wait_for_their_longest_and_begin_with_the_shortest_prompts():
    static, continuous = (make(name, JOBS) for name in (STATIC, CONTINUOUS))
    running = []
    while not static.is_done:
        static.step()
        running.append(set(np.flatnonzero((static.num_tokens > 0) & np.isfinite(static.first_at)).tolist()))
    order = sorted(range(5), key=lambda i: static.first_at[i])
    assert set(order[:2]) == {1, 3} and set(order[2:4]) == {4, 2} and order[4] == 0  # by their prompts
    assert static.first_at[[4, 2]].min() >= static.last_at[[1, 3]].max()
    continuous.turn(31)
    assert static.record()["num_steps"] > continuous.record()["num_steps"]


@pytest.mark.slow
def test_who_comes_later_is_not_served_before_and_idle_time_is_skipped():
    jobs = [JOBS[0], JOBS[1]._replace(arrival=1000.0)]
    server = make(CONTINUOUS, jobs)
    server.turn(23)
    assert server.last_at[0] < 1000 <= server.first_at[1] < 1100
    assert server.record()["first_token_s"]["p99"] < 100


@pytest.mark.slow
def test_a_dispatch_per_token_is_one_transfer_per_step():
    server = make(HOST, JOBS[1:2])
    server.turn(20)
    record = server.record()
    assert record["transfers_per_step"] >= 1 and record["num_steps"] == record["num_tokens"] == 20


# --- a busy host ---


def test_the_disturbance_is_there_and_ends():
    before = threading.active_count()
    with interference.disturbance():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_deliveries_are_timed_in_turns(monkeypatch):
    """The delivery that was under way when a turn began is not counted."""
    states = []

    class Fake(Server):
        def __init__(self, name, max_steps, engine):
            super().__init__(name, engine, JOBS[:1], max_steps=max_steps)
            self.num_tokens[:] = 1
            self.second = 0.0

        def step(self):
            self.second += self.max_steps * (2.0 if threading.active_count() > num_threads else 1.0)
            states.append(self.name)
            return self.second

    engine = SIZES.engine(look_up, table_of(VOCAB), LAYERS, True)
    num_threads = threading.active_count()
    records = interference.measure([Fake("a", 16, engine), Fake("b", 1, engine)], 3, 32)
    assert [record["deliveries"] for record in records] == [6, 96]
    assert records[0]["idle_ms"]["p50"] == 16e3 and records[1]["disturbed_ms"]["p99"] == 2e3
    assert [record["slow_down_p99"] for record in records] == [2, 2]
    assert states[:4] == ["a"] * 3 + ["b"] and len(states) == 6 * (3 + 33)
    jobs = interference.endless(JOBS, 2, interference.num_tokens(3, 32))
    assert [job.num_tokens for job in jobs] == [640] * 2 and jobs[0].prompt == JOBS[0].prompt


# --- Prometheus ---


@pytest.mark.slow
def test_prometheus_text_has_the_names_of_vllm(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    from experiments.common import prometheus

    server = make(PREFIX, JOBS)
    server.turn(31)
    path = tmp_path / "metrics.prom"
    prometheus.write(path, server.engine.metrics(), model_name="a model", engine=PREFIX)
    families = {family.name: family for family in parser.text_string_to_metric_families(path.read_text())}
    samples = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    counts = server.counts
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:prompt_tokens_total"] == samples["vllm:prefix_cache_queries_total"] == 68
    assert samples["vllm:prefix_cache_hits_total"] == counts[kv.engine.Counter.CACHED_TOKENS] > 0
    assert samples["vllm:generation_tokens_total"] == samples["vllm:request_generation_tokens_sum"] == 31
    assert samples["vllm:request_success_total"] == 5
    assert samples["vllm:num_preemptions_total"] == counts[kv.engine.Counter.PREEMPTIONS]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert families[f"vllm:{name}"].type == "histogram" and samples[f"vllm:{name}_count"] == 5
    assert 0 < samples["vllm:e2e_request_latency_seconds_sum"] <= server.last_at.sum()
    (success,) = families["vllm:request_success"].samples[:1]
    assert success.labels == {"model_name": "a model", "engine": PREFIX, "finished_reason": "length"}
    assert [*tmp_path.iterdir()] == [path]


# --- verdicts, tables, the record ---


@pytest.fixture
def found(recorded):
    return recorded("serve")


def test_the_time_of_a_token_is_measured_between_deliveries():
    """Answers that come at once have none; of others the first delivery's tokens do not count."""
    short = make(CONTINUOUS, [Job([1, 2], 3, 0.0), Job([3], 10, 0.0)])
    assert short.record()["per_token_ms"] == {"p50": None, "p99": None}
    deliveries = [(0, 2, 1.0), (1, 4, 1.0), (1, 4, 3.0), (1, 2, 4.0)]
    for nth, (i, num_tokens, now) in enumerate(deliveries):
        short._note(kv.engine.TokenEvent(i, 0, [0] * num_tokens, [0.0] * num_tokens, [], None), now)
        if nth == 0:
            assert short.record()["per_token_ms"] == {"p50": None, "p99": None}
    assert short.record()["per_token_ms"] == {"p50": 500.0, "p99": 500.0}


def test_what_was_not_measured_is_a_dash(found):
    for percentiles in ({"p50": None, "p99": None}, {"p50": 0.0, "p99": 92.7}):
        found["workloads"][0]["sides"][1]["per_token_ms"] = percentiles
        row = next(line for line in report.markdown(found).splitlines() if line.startswith("| continuous |"))
        assert row.split(" | ")[3] == "-"


def test_titles_of_the_picture_do_not_meet_and_say_how_large_the_pool_is(found):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    found["workloads"][0]["name"] = "prompts of eight questions with their answers, and two more"
    for side in [side for work in found["workloads"] for side in work["sides"]]:
        side["num_blocks"] = 2_147_483
    figure = report.picture(found)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for panel in figure.axes for text in (panel.title, panel.xaxis.label)]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    apart = [not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert all(apart) and all(figure.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))
    assert sum("blocks held, of 2,147,483" in text.get_text() for text in texts) == 2


def test_verdicts_can_be_either(found):
    assert bars_of(found) == found["bars"]
    problems = {side["side"]: side for side in found["workloads"][0]["sides"]}
    problems[STATIC]["tokens_per_s"], problems[CONTINUOUS]["tokens_per_s"] = 100.0, 131.0
    problems[TABLE] |= {"step_ms": problems[PREFIX]["step_ms"], "programs": 2}
    problems[PREFIX]["transfers_per_step"] = 0.5
    found["interference"][0]["slow_down_p99"] = 9.0
    verdicts = [bar["holds"] for bar in bars_of(found)]
    assert verdicts == [True, True, False, False, True, False, True, False]


def test_the_command_reports_what_it_measured(monkeypatch, capsys, report_of, found):
    monkeypatch.setattr(command, "run", lambda options: ([], found))
    record = report_of(command)
    assert record["workloads"] == found["workloads"] and record["revision"] is not None
    assert command.main(["--markdown", str(ROOT / "experiments" / "results" / "serve.json")]) == 0
    _, prefix, *_ = found["bars"]
    row = f"| {prefix['bar']} | {prefix['measured']:.3g} | at least 2 | holds |"
    assert row in capsys.readouterr().out


@pytest.mark.parametrize("name", ["serve", "serve_simulated"])
def test_the_documents_tables_are_those_of_the_record(name, recorded):
    """`python -m experiments.serve --markdown experiments/results/NAME.json` prints them."""
    record, document = recorded(name), (ROOT / "docs" / "measured.md").read_text()
    for table in report.markdown(record).split("\n\n"):
        assert table.strip() in document
    if name == "serve":
        readme = (ROOT / "README.md").read_text()
        batches, prefix = (bar["measured"] for bar in record["bars"][:2])
        engine, host = (side["slow_down_p99"] for side in record["interference"])
        assert f"{batches:.2f} times static batches, {prefix:.2f} times" in readme
        assert f"{engine:.2f} times an idle host's; a dispatch per token: {host:.2f} |" in readme


@pytest.mark.slow
def test_a_machine_that_is_only_named_serves_all(monkeypatch, report_of):
    monkeypatch.delenv("KVCACHE_DATA_DIR", raising=False)
    arguments = ["--simulate", "--rows", "4", "--requests", "12", "--lengths", "0.1"]
    simulated = report_of(command, *arguments)["simulated"]
    assert [side["num_requests"] for side in simulated["sides"]] == [12, 12]
    static, continuous = simulated["sides"]
    assert continuous["tokens_per_s"] > static["tokens_per_s"] and static["most_rows"] <= 4
    assert all(math.isfinite(side["here_step_ms"]) for side in simulated["sides"])


@pytest.mark.slow
def test_a_program_is_compiled_anew_and_then_is_the_only_one():
    engine = Sizes(3, 32, steps_per_dispatch=2).engine(look_up, table_of(VOCAB), LAYERS, False)
    with sides.watched("the program") as programs:
        cost = sides.program_cost(engine)
    assert programs.num_programs == 1 and cost["pool_bytes"] == kv.memory_bytes(engine.config)
    assert cost["compile_s"] > 0.1 and cost["temporary_bytes"] > 0
    assert sides.warm_up(engine) <= 1 and sides.warm_up(engine) == 0


@pytest.fixture
def tiny_model(monkeypatch):
    """A model of two small layers, in place of the trained one, and no data."""
    monkeypatch.setattr(command, "load", lambda options: tiny.decoder())
    monkeypatch.delenv("KVCACHE_DATA_DIR", raising=False)


@pytest.mark.slow
def test_a_small_run_measures_all(tiny_model, monkeypatch, report_of):
    monkeypatch.setattr(command, "few_shot", lambda data, trace, *rest: workload.alike(*rest))
    cost = {"compile_s": 1.0, "temporary_bytes": 1, "pool_bytes": 8}  # compiled anew it takes long
    monkeypatch.setattr(sides, "program_cost", lambda engine: cost)
    for name, value in (("NUM_TURNS", 2), ("NUM_ROUNDS", 1), ("STEPS_PER_TURN", 32)):
        monkeypatch.setattr(compare, name, value)
    arguments = ["--rows", "2", "--requests", "3", "--few-shot", "3", "--lengths", "0.05", "--interference"]
    found = report_of(command, *arguments)
    problems, questions = ({side["side"]: side for side in work["sides"]} for work in found["workloads"])
    assert [side["num_requests"] for side in problems.values()] == [3] * 5
    assert problems[STATIC]["num_steps"] >= problems[CONTINUOUS]["num_steps"]
    assert questions[PREFIX]["hit_rate"] > 0.3 and questions[CONTINUOUS]["hit_rate"] == 0
    assert {IDLE + "_ms", DISTURBED + "_ms"} <= found["interference"][0].keys()
    assert found["program"] == cost and len(found["bars"]) == 8
    assert problems[PREFIX]["programs"] == 1 and questions[PREFIX]["programs"] == 0


@pytest.mark.slow
def test_the_demo_serves_all_in_a_pool_that_is_too_small(tiny_model, report_of):
    (side,) = report_of(command, "--demo", "--requests", "12", "--rows", "4")["workloads"][0]["sides"]
    assert side["num_requests"] == 12 and side["hit_rate"] > 0.3
