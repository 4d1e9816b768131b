"""Each file as a reader runs it: the demos end well, bad input ends in one line."""
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from moa import DRAFTERS
from model import cli

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd=ROOT):
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("command, says", [
    (["model.py", "--max-new-tokens", "8"], "identical: yes"),
    (["moa.py", "--max-new-tokens", "24"], "Agreement"),
    (["speculative.py", "--max-new-tokens", "16", "--prompts", "2"], "identical: yes"),
    (["speculative.py", "--max-new-tokens", "16", "--prompt", "", "--temperature", "0.8", "--top-k", "50"], "tau"),
    (["speculative.py", "--max-new-tokens", "0", "--prompt", "x"], "tau"),
    (["speculative.py", "--max-new-tokens", "16", "--prompts", "1", "--tree", "3x4:8", "--drafter", "eagle", "--trace"], "cycle 2"),
    (["speculative.py", "--max-new-tokens", "12", "--prompts", "1", "--draft-length", "auto"], "expected tokens/s by length"),
    (["serve_local.py", "--max-new-tokens", "24"], "identical to plain decoding: yes"),
    (["serve_local.py", "policies", "--profile", "lte", "--max-new-tokens", "4", "--prompts", "1", "--client-slowdown", "2"], "client x2 slower, server x1 faster"),
    (["speculative.py", "--max-new-tokens", "9", "--prompt", "añ漢🙂<|endoftext|>", "--draft-length", "0"], "identical: yes"),
])  # fmt: skip
def test_demos(command, says):
    done = run(*command)
    assert done.returncode == 0 and says in done.stdout and "NO" not in done.stdout and not done.stderr, done.stderr
    assert "\033" not in done.stdout  # no colour where there is no terminal


SMALL = ["--data", str(ROOT / "model.py"), "--batch", "1", "--minutes", "0.001"]


@pytest.mark.parametrize("command", [
    ["model", "--weights", "nowhere"], ["moa", "--weights", "nowhere"], ["speculative", "--weights", "nowhere"],
    ["model", "--weights", "README.md"], ["model", "nonsense"], ["speculative", "--colour"], ["model", "--device", "toaster"],
    ["model", "--prompt", "word " * 600], ["speculative", "--prompt", "word " * 600], ["model", "--max-new-tokens", "-1"],
    ["speculative", "--temperature", "-1"], ["speculative", "--top-p", "0"], ["speculative", "--top-k", "-1"],
    ["speculative", "--draft-length", "-1"], ["speculative", "--max-new-tokens", "-1"], ["speculative", "--prompts", "0"],
    ["speculative", "--confidence", "7"], ["speculative", "--json", "no/such/folder/x"], ["speculative", "--json", "weights"],
    ["speculative", "--drafter", "nothing"], ["speculative", "--drafter", "target"], ["moa", "--drafter", "nothing"],
    ["speculative", "--drafter"], ["speculative", "--tree", "4x4"], ["speculative", "--tree", "0x4:4"], ["speculative", "--tree", "99x99:9"],
    ["speculative", "--draft-length", "many"], ["speculative", "--draft-length", "513"], ["speculative", "compare", "--svg", "no/such/x"],
    ["speculative", "--draft-length", "auto", "--prompt", "x", "--max-new-tokens", "-1"], ["speculative", "--trace", "x"],
    ["moa", "--prompt", "x", "--max-new-tokens", "2"], ["moa", "--max-new-tokens", "0"], ["moa", "--prompt", "word " * 600],
    ["serve_local", "--weights", "nowhere"], ["serve_local", "--profile", "5G"], ["serve_local", "--outage", "3:1"], ["serve_local", "--outage", "x"],
    ["serve_local", "--drafter", "nothing"], ["serve_local", "--draft-length", "-1"], ["serve_local", "--loss", "1"], ["serve_local", "--wire", "fp8"],
    ["serve_local", "--temperature", "-1"], ["serve_local", "--verify-ms", "0"], ["serve_local", "--json", "weights"],
    ["serve_local", "--seed", "-1"], ["serve_local", "serve", "--port", "99999"], ["serve_local", "serve"], ["serve_local", "--draft-ms", "inf"],
    ["serve_local", "--disconnect-after", "nan"], ["serve_local", "--jitter", "-1"], ["serve_local", "--outage", "1"], ["serve_local", "--draft-length", "25"],
    ["serve_local", "compare", "--outage", "1:2"],
    ["serve_local", "compare", "--max-new-tokens", "0"], ["speculative", "--svg", "x.svg"],
    ["serve_local", "--prompt", "word " * 600], ["serve_local", "--max-new-tokens", "-1"], ["serve_local", "--client-slowdown", "0"],
    ["moa", "train", "--init", "--weights", "nowhere"],
    ["model", "train", "--data", "nowhere"], ["model", "train", "--batch", "0"], ["model", "train", "--minutes", "-1"],
    ["model", "train", "--window", "1"], ["moa", "train", "--periods", "5", "2"], ["moa", "train", "--drafter", "moa99"],
    ["moa", "train", *SMALL, "--batch", "100000"], ["moa", "train", *SMALL, "--resume", "--checkpoint", "nothing"],
    ["moa", "train", *SMALL, "--checkpoint", "no/such/folder/x"],
])  # fmt: skip
def test_bad_input_is_one_line(command, monkeypatch, capsys):
    """In this process, by way of the function that every file hands its main to."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", command)
    torch.set_default_dtype(torch.float32)  # what a person has
    try:
        with pytest.raises(SystemExit) as stop:
            cli(importlib.import_module(command[0]).main)
    finally:
        torch.set_default_dtype(torch.float64)
    assert str(stop.value.code).startswith("error: ") and "\n" not in stop.value.code


def test_one_line_is_all_that_a_person_sees():
    done = run("speculative.py", "--weights", "nowhere")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_the_readmes_own_drafter_is_exact(tmp_path):
    """The class that the README shows, through the tests that it says judge it, and the lines that use it."""
    drafter, use = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "mine.py").write_text(drafter)
    done = subprocess.run([sys.executable, "-c", use], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    _, plain, a, speculative, b = re.split(r"\w+: (\d+) passes, .*\n", done.stdout)
    assert int(speculative) < int(plain) == 64 and a == b, done
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_speculative.py", "-k", "yours or cache_holds or max_new_tokens",
               "--drafter", f"{tmp_path / 'mine.py'}:PromptLookup")  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout


def test_a_closed_standard_output_is_no_traceback():
    done = subprocess.run(f"{sys.executable} speculative.py --prompts 1 --max-new-tokens 2 >&-", shell=True, cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_json_holds_every_number_of_the_table(tmp_path):
    done = run("speculative.py", "--max-new-tokens", "16", "--prompts", "2", "--json", tmp_path / "out.json")
    out = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 0 and out["identical"] is True and out["settings"]["draft_length"] == 6 and out["machine"]
    for key in ("plain_tokens_per_s", "tokens_per_s", "speedup", "tau", "draft_ms", "verify_ms", "observe_ms", "target_passes"):
        assert out[key] > 0
    assert 1 <= len(out["acceptance_by_position"]) <= 6 and f"{out['tau']:.2f}" in done.stdout


def test_compare_measures_every_method_and_draws_them(tmp_path):
    done = run("speculative.py", "compare", "--prompts", "2", "--max-new-tokens", "14", "--drafter", "moa0", "eagle", "independent",
               "--json", tmp_path / "out.json", "--svg", tmp_path / "out.svg")  # fmt: skip
    assert done.returncode == 0 and "identical: yes" in done.stdout and "moa0 / eagle: tau chain" in done.stdout, done.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    assert [method["name"] for method in out["methods"]] == ["moa0", "eagle", "independent"]
    for method in out["methods"]:
        assert method["parameters"] > 1e6 and len(method["agreement_by_distance"]) == 8 and max(method["agreement_by_distance"]) > 0
        for shape in ("chain", "tree"):
            assert method[shape]["tau"] >= 1 and method[shape]["speedup"] > 0 and method[shape]["identical"]
    assert out["over_eagle"]["moa0"]["tau_tree"] > 0
    lines = ElementTree.parse(tmp_path / "out.svg").findall(".//{*}polyline")
    assert len(lines) == 3 and all(len(line.get("points").split()) == 8 for line in lines)


def test_trains_resumes_and_decodes_what_it_trained(tmp_path):
    """On a small text: target and drafter, a resumed run that goes on counting, one that must not, and the loop over it."""
    (tmp_path / "text").write_text("".join(f"line {i} of a text about {i % 7} cats\n" for i in range(3000)))
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "tokenizer.tiktoken").write_text((ROOT / "weights" / "tokenizer.tiktoken").read_text())
    common = ["--data", tmp_path / "text", "--weights", weights, "--batch", "2", "--window", "64", "--save-every", "0"]
    saved = lambda: torch.load(tmp_path / "ckpt", weights_only=True)
    for file, drafters in (("model.py", []), ("moa.py", ["--drafter", *DRAFTERS])):
        command = [file, "train", *common, *drafters, "--checkpoint", tmp_path / "ckpt"]
        done = run(*command, "--steps", "2")
        assert done.returncode == 0 and saved()["step"] == 2, done.stderr
        done = run(*command, "--steps", "3", "--resume")
        assert done.returncode == 0 and "held-out" in done.stdout and saved()["step"] == 3, done.stderr
    for name, (_, settings) in DRAFTERS.items():
        how = json.loads((weights / f"{name}.json").read_text())
        assert how["steps"] == 3 and how["tokens"] == 3 * 2 * 64 and how["held_out"]["cross_entropy"] > 0
        assert settings.items() <= how["settings"].items()
    before = torch.load(weights / "eagle.pt", weights_only=True)["weights"]
    done = run("moa.py", "train", *common, "--checkpoint", tmp_path / "ckpt2", "--steps", "1", "--init", "--drafter", "eagle", "--lr", "1e-9")
    assert done.returncode == 0 and json.loads((weights / "eagle.json").read_text())["steps"] == 4, done.stderr
    after = torch.load(weights / "eagle.pt", weights_only=True)["weights"]  # it went on from those weights, not from new ones
    assert all((after[name].float() - w.float()).abs().max() < 0.01 for name, w in before.items())
    done = run("model.py", "train", *common, "--checkpoint", tmp_path / "ckpt", "--resume")
    assert done.returncode != 0 and "another run" in done.stderr
    done = run("moa.py", "train", *common, "--checkpoint", tmp_path / "ckpt", "--minutes", "0.001", "--drafter", "moa0")
    assert done.returncode == 0 and saved()["step"] >= 1, done.stderr
    done = run("speculative.py", "--weights", weights, "--max-new-tokens", "12", "--drafter", "moa3", "--json", tmp_path / "out.json")
    assert done.returncode == 0 and "identical: yes" in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["tau"] >= 1
