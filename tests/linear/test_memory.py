"""The memory of packed models: while they are packed, and of processes that load one file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quire.linear import load, pack, save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PACK = """
import sys, re, torch, transformers as hf
from pathlib import Path
from torch import nn
from quire.linear import pack, unpack

def of(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

sizes = dict(hidden_size=512, intermediate_size=4096, num_attention_heads=8, vocab_size=64)
config = hf.LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=6)
experts = hf.MixtralConfig(**sizes, num_local_experts=8, num_key_value_heads=2, num_hidden_layers=2)
experts.intermediate_size = 1024
models = {
    "plain": lambda: nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]),
    "fused": lambda: hf.AutoModelForCausalLM.from_config(config),
    "experts": lambda: hf.AutoModelForCausalLM.from_config(experts),
}
pack(nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.RMSNorm(64)))  # loads the code
model = models[sys.argv[1]]()
for change in (pack, unpack):
    before = of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    change(model)
    print(of("VmHWM") - before)
"""


@pytest.mark.parametrize(("kind", "largest"), [("plain", 17), ("fused", 17), ("experts", 34)])
def test_one_layer_at_most_is_in_both_forms(kind: str, largest: int) -> None:
    """The models have 130 to 180 MB; 8 MB are for what is copied.

    The first products of all experts are one tensor, of 34 MB. Packed layers share large pages, if
    the system has some, so the last may end 2 MB later. They are freed by rooms of 32 MB.
    """
    done = subprocess.run([sys.executable, "-c", PACK, kind], capture_output=True, check=True)
    packing, unpacking = map(int, done.stdout.split())
    assert packing <= (largest + 8 + 2) << 20
    assert unpacking <= (largest + 8 + 32 + 2) << 20


LOAD = """
import re, sys, torch
from pathlib import Path
from torch import nn
from quire.linear import load

with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
load(model, sys.argv[1])(torch.ones(1, 1024))
found = {"Rss": 0, "Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
for part in re.split(r"^(?=\\S+-\\S+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
    if sys.argv[1] in part:
        for name in found:
            found[name] += int(re.search(name + r":\\s+(\\d+) kB", part)[1]) << 10
print(*found.values())
"""


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(pack(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])), path)
    with torch.device("meta"):
        mine = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    load(mine, path)(torch.ones(1, 1024))  # which reads all of it
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, check=True, text=True
    )
    resident, share, clean, dirty = map(int, re.findall(r"\d+", done.stdout))
    assert resident > 0.95 * 4 * 4 * 1024**2
    assert share < 0.55 * resident
    assert clean + dirty < 0.05 * resident
