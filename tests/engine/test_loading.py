"""Models by their name: a directory, and the options that say where files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from serving import save_model

from quire.engine import Engine


def test_a_model_in_a_subfolder(tmp_path: Path) -> None:
    save_model(tmp_path / "inner")
    options: dict[str, Any] = {"subfolder": "inner", "local_files_only": True}
    with Engine.from_pretrained(tmp_path, model_options=options, n_pages=8, start=False) as served:
        assert served.submit("text", max_tokens=2).result().num_prompt > 0


def test_the_tokenizer_is_that_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path)
    given: list[dict[str, Any]] = []
    real = transformers.AutoTokenizer.from_pretrained

    def noted(name: Any, **options: Any) -> Any:
        given.append(options)
        return real(name)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", noted)
    where = {"revision": "main", "cache_dir": str(tmp_path), "token": False}
    options = {**where, "trust_remote_code": False, "low_cpu_mem_usage": True}
    Engine.from_pretrained(tmp_path, model_options=options, n_pages=8, start=False).close()
    assert given == [{**where, "trust_remote_code": False}]
