"""lowtide with torch, YAML and scipy alone: the runtime trains, and what needs more says what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("transformers", "safetensors", "matplotlib", "peft", "trl", "accelerate", "lightning", "torchtitan", "psutil")
CODE = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import contextlib, io, json, torch, lowtide
from lowtide.cli.main import main

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
with lowtide.optimize(model, "1.5MiB", memory={{"min_bytes": 0}}, optimizer=optimizer) as tide:
    for _ in range(3):
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lowtide.write_report(tide, "run.trace.json")
    try:
        lowtide.write_report(tide, "run.html")
    except lowtide.ConfigError as error:
        said = [str(error)]
plans = ("plan run.yaml --hardware h100", "plan --model tiny.json --hardware h100")
for words in ("report .", *plans, "doctor --no-measure"):
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(io.StringIO()):
        status = main(words.split())
    said.append([status, out.getvalue()])
print(json.dumps(said))
"""


def test_training_works_and_commands_name_the_extra(tmp_path: Path) -> None:
    run = "model: {model_type: llama}\ntrain: {steps: 1}\nmemory: {budget: 1GiB}\n"
    (tmp_path / "run.yaml").write_text(run, encoding="utf-8")
    (tmp_path / "tiny.json").write_text("{}", encoding="utf-8")
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "code.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    pictures, report, *commands, doctor = json.loads(done.stdout.splitlines()[-1])
    assert pictures == "report: pictures need matplotlib; pip install 'lowtide[report]'"
    assert report == [2, f"{pictures}\n"]  # before anything else
    needed = [2, "lowtide: this needs transformers; run: pip install 'lowtide[train]'\n"]
    assert [[status, said.splitlines(keepends=True)[-1]] for status, said in commands] == [needed, needed]
    assert doctor[0] in (0, 1)
