"""Scores for the lm-evaluation-harness: against our own token losses, and against its own `hf` model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hf_cases import LENGTH, a_run

from data_prep.tokenizing import train_bpe
from megatron_patches.config import ConfigError
from megatron_patches.hf.harness import NAME, register, scorer, writing
from megatron_patches.standalone import load_model

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["def main(argv):\n    return 0\n", "the cat sat on the mat and ate the rat " * 6]
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed (extra hf)"
)
# Of the harness and of what it loads, about their own code.
foreign = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    words = train_bpe(TEXTS * 20, 290)
    words.save(folder)
    run = a_run(
        folder / "run",
        "kerple_log",
        padded_vocab_size=320,
        tokenizer_type="HFTokenizer",
        vocab_file=str(folder / "tokenizer.json"),
    )
    (run / "run.json").write_text(json.dumps({"tokenizer": words.fingerprint}))
    return run


def losses(run: Path, ids: list[int]) -> list[float]:
    """Minus the log-probabilities of `ids[1:]`, one input, in float64 from the model's logits."""
    with torch.no_grad():
        logits = load_model(run)(torch.tensor([ids[:-1]])).double()[0]
    return [float(-row.log_softmax(-1)[i]) for row, i in zip(logits, ids[1:], strict=True)]


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_sums_of_our_token_losses(run, batch_size):
    made = scorer(run, batch_size=batch_size)
    a, b = (made.words.encode(text) for text in TEXTS)
    pairs = [(a[:3], a[3:6]), (b[:9], b[9:10]), (a[:1], a[1:5]), (b[:2], [])]
    found = made.score(pairs)
    for (context, text), (value, _) in zip(pairs, found, strict=True):
        wanted = losses(run, [*context, *text])[len(context) - 1 :] if text else []
        assert value == pytest.approx(-sum(wanted), abs=1e-4)
    own = load_model(run).token_losses(torch.tensor([a[:5]]), torch.tensor([a[1:6]]))
    assert found[0][0] == pytest.approx(-float(own[0, 2:].sum()), abs=1e-4)


def test_greedy_and_too_long(run):
    made = scorer(run)
    ids = made.words.encode(TEXTS[1])
    likeliest = int(load_model(run)(torch.tensor([ids[:4]]))[0, -1].argmax())
    other = (likeliest + 1) % 290
    assert [greedy for _, greedy in made.score([(ids[:4], [likeliest]), (ids[:4], [other])])] == [
        True,
        False,
    ]
    # A context that does not fit loses its beginning.
    (long,) = made.score([(ids[:30], ids[30:33])])
    tail = losses(run, ids[33 - LENGTH - 1 : 33])[-3:]
    assert long[0] == pytest.approx(-sum(tail), abs=1e-4)
    more = scorer(run, max_length=64)  # the method reads on
    (long,) = more.score([(ids[:30], ids[30:33])])
    assert long[0] == pytest.approx(-sum(losses(run, ids[:33])[-3:]), abs=1e-4)
    with pytest.raises(ValueError, match="17 tokens, max_length is 16"):
        made.score([(ids[:1], ids[1:18])])
    with pytest.raises(ValueError, match="a context has no tokens"):
        made.score([([], ids[:2])])


def test_texts_end_before_the_stop_string(run):
    made = scorer(run, max_length=64)
    prompts = [made.words.encode("the cat sat"), made.words.encode("def")]
    together = made.write(prompts, [], 20)
    assert [made.write([prompt], [], 20)[0] for prompt in prompts] == together
    stop = together[0][3:5]
    assert made.write(prompts[:1], [stop], 20) == [together[0][: together[0].index(stop)]]
    with pytest.raises(ValueError, match="leave no context"):
        made.write(prompts, [], 64)


def test_a_setting_of_0_is_a_setting(run):
    made = scorer(run, max_length=64)
    prompts = [made.words.encode("the cat sat")]
    sampled = {"max_gen_toks": 20, "do_sample": True}
    (likeliest,) = made.write(prompts, **writing({"max_gen_toks": 20}))
    assert made.write(prompts, **writing({**sampled, "temperature": 0.0})) == [likeliest]
    assert made.write(prompts, **writing(sampled)) != [likeliest]
    warm = writing({**sampled, "temperature": 0.5, "top_k": 0})
    assert (warm["temperature"], warm["top_k"]) == (0.5, None)
    assert writing({**sampled, "temperature": None, "top_k": 5})["temperature"] == 1.0
    assert writing({**sampled, "top_k": 5})["top_k"] == 5
    assert made.write(prompts, **writing({"max_gen_toks": 0})) == [""]
    assert writing({"until": "x"}) == {"until": ["x"], "tokens": 256}
    with pytest.raises(ConfigError, match="generation with top_p is not supported"):
        writing({"top_p": 0.5, "num_beams": None})


def test_wrong_settings(run, tmp_path):
    with pytest.raises(ConfigError, match="dtype int8"):
        scorer(run, dtype="int8")
    table = a_run(tmp_path / "run", "learned", padded_vocab_size=320)
    with pytest.raises(ValueError, match="cannot read 17 tokens"):
        scorer(table, tokenizer=run.parent / "tokenizer.json", max_length=17)
    with pytest.raises(ConfigError, match="names no tokenizer"):
        scorer(table)


# ---- with the harness itself -----------------------------------------------------------------

CHOICE = """
task: toy_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """
task: toy_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITING = """
task: toy_writing
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASKS = ["toy_choice", "toy_rolling", "toy_writing"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in zip(TASKS, (CHOICE, ROLLING, WRITING), strict=True):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    choices = [" cat", " mat and ate", " argv"]
    rows = [
        {"question": question, "choices": choices, "answer": 1}
        for question in ("the", "def main(", "sat on")
    ]
    (folder / "choice.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"text": text, "start": text[:7]} for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def evaluate(tasks: Path, monkeypatch, **model):
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    return lm_eval.simple_evaluate(
        **model,
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        batch_size=2,
        device="cpu",
    )


@needs_harness
@foreign
def test_the_harness_gives_what_its_own_model_gives(run, tasks, tmp_path, monkeypatch):
    """Its `hf` model runs the folder that `carry` wrote: other code for model, scoring and writing."""
    from megatron_patches.hf import carry

    carry(run, tmp_path / "carried")
    register()
    ours = evaluate(tasks, monkeypatch, model=NAME, model_args={"checkpoint": str(run)})
    settings = {"pretrained": str(tmp_path / "carried"), "trust_remote_code": True}
    settings |= {"max_length": LENGTH, "dtype": "float32", "add_bos_token": False}
    theirs = evaluate(tasks, monkeypatch, model="hf", model_args=settings)
    for task in TASKS:
        for found, wanted in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert flat(found["resps"]) == pytest.approx(flat(wanted["resps"]), abs=1e-3)
    assert ours["results"]["toy_rolling"]["bits_per_byte,none"] > 0.5


def flat(answers) -> list:
    """Numbers and texts of nested answers; a text is compared by its characters."""
    if isinstance(answers, str):
        return [float(ord(character)) for character in answers]
    if isinstance(answers, list | tuple):
        return [value for answer in answers for value in flat(answer)]
    return [float(answers)]


@needs_harness
@foreign
def test_rolling_is_the_sum_over_windows(run):
    from lm_eval.api.instance import Instance

    model = register()(checkpoint=str(run))
    text = TEXTS[1]
    ids = [model.prefix_token_id, *model.tok_encode(text)]
    assert len(ids) > 2 * LENGTH
    wanted, at = 0.0, 1
    while at < len(ids):
        # disjoint windows of the training length, each token with as much before it as it has room for
        last = min(at + LENGTH, len(ids))
        first = max(0, last - LENGTH - 1)
        wanted -= sum(losses(run, ids[first:last])[at - last :])
        at = last
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    (found,) = model.loglikelihood_rolling([request])
    assert found == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(ConfigError, match="top_p is not supported"):
        model.generate_until([Instance("generate_until", {}, ("x", {"top_p": 0.5}), 0)])


def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness_script", ROOT / "scripts/harness.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_harness
@foreign
def test_the_command(run, tasks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    asked = ["harness.py", str(run), "--include-path", str(tasks), "--output", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", [*asked, "--tasks", "toy_rolling"])
    assert command().main() == 0
    assert "toy_rolling" in capsys.readouterr().out
    found = json.loads((tmp_path / "o").read_text())["results"]["toy_rolling"]
    assert found["bits_per_byte,none"] > 0.5
    assert command().main() == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_harness_it_says_so(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["harness.py", str(run), "--tasks", "toy"])
    assert command().main() == 2
    assert "pip install '.[hf]'" in capsys.readouterr().err
