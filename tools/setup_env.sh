#!/usr/bin/env bash
# Makes .venv with everything mrl needs: setup_env.sh [cpu|gpu]. Does nothing where .venv is up to date.
# Interrupted at any point, the next run repairs or rebuilds. PYTHON=/path/to/python picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly platform="${1:-cpu}"
readonly torch_version=2.13.0
readonly torch_cpu_index=https://download.pytorch.org/whl/cpu
readonly venv=.venv
readonly stamp="$venv/.mrl-stamp"       # written last: set-up is complete, for the key it holds
readonly building="$venv/.mrl-building" # there while a set-up is under way
readonly log="$venv/setup.log"
readonly began=$SECONDS

say() { printf 'env: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

# Runs a step with its output in the log; prints one line for it, with seconds.
step() {
    local what="$1" start=$SECONDS
    shift
    printf 'env: %s ...' "$what" >&2
    if "$@" >>"$log" 2>&1; then
        printf ' %d s\n' $((SECONDS - start)) >&2
    else
        printf ' failed\n' >&2
        tail -n 15 "$log" >&2
        die "$what failed (the whole log is $log); correct the cause and run make env again"
    fi
}

is_usable() { # Python 3.11 or 3.12 that can make virtual environments; found by running it, as shims may lead nowhere
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if is_usable "$PYTHON"; then command -v "$PYTHON"; fi
        return
    fi
    local name candidate
    for name in python3.11 python3.12 python3; do
        while read -r candidate; do
            if is_usable "$candidate"; then
                echo "$candidate"
                return
            fi
        done < <(type -ap "$name" || true)
    done
}

case "$platform" in
cpu | gpu) ;;
*) die "PLATFORM=$platform is unknown; take cpu or gpu" ;;
esac

missing=()
python=$(find_python)
[ -n "$python" ] || missing+=("${PYTHON:+a usable PYTHON=$PYTHON: }Python 3.11 or 3.12 with venv (Debian: apt-get install python3 python3-venv)")
command -v git >/dev/null || missing+=("git (apt-get install git)")
command -v g++ >/dev/null || missing+=("a C++ compiler (apt-get install g++)")
if [ ${#missing[@]} -gt 0 ]; then
    list=$(printf '%s; ' "${missing[@]}")
    die "missing: ${list%; }"
fi

version=$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))')
key=$({ cat pyproject.toml tools/setup_env.sh && echo "$platform $version $PWD"; } | sha256sum | cut -d' ' -f1)
readonly pip="$venv/bin/python -m pip"

runs() { "$venv/bin/python" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && [ "$(runs)" = "$version" ]; then
    exit 0
fi

if [ -d "$venv" ] && [ ! -f "$stamp" ] && [ ! -f "$building" ]; then
    # Not made by this script: added to, never deleted.
    [ "$(runs)" = "$version" ] || die "$venv is not of this set-up and not Python $version; move it away and run make env again"
elif [ -f "$building" ] || [ "$(runs)" != "$version" ]; then
    rm -rf "$venv"
fi
mkdir -p "$venv"
touch "$building"
rm -f "$stamp"
: >"$log"

# Whether pip would install a CUDA build of torch: asked without downloading it. Fails where it finds none at all.
would_be_cuda() {
    $pip install --dry-run --quiet --report - "torch==$torch_version" 2>>"$log" | "$venv/bin/python" -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
sys.exit(not any(name.startswith(("nvidia-", "cuda-")) for name in names))' 2>>"$log"
}

install_cpu() {
    local index=()
    if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
        local torch="torch==$torch_version"
        if would_be_cuda; then
            say "pip as configured has only a CUDA build of torch; taking PyTorch's CPU index"
            index=(--extra-index-url "$torch_cpu_index")
            torch="torch==$torch_version+cpu"
        fi
        step "installing torch $torch_version (CPU)" $pip install "${index[@]}" "$torch"
    fi
    step "installing Megatron-Core, vLLM and mrl (some 3 GB, a few minutes)" \
        $pip install "${index[@]}" -e '.[cpu,test,dev]'
}

install_gpu() {
    step "installing vLLM with its CUDA torch" $pip install 'setuptools>=77' wheel ninja pybind11 'vllm>=0.24'
    # Transformer Engine compiles against the torch that is there.
    step "installing Transformer Engine (compiles for some minutes)" \
        $pip install --no-build-isolation 'transformer-engine[pytorch]>=2.8'
    step "installing Megatron-Core and mrl" $pip install -e '.[gpu,test,dev]'
}

# vLLM brings these; nothing of mrl needs them, and where they do not match torch, transformers and vLLM fail to import.
remove_unusable() {
    local package
    for package in torchvision torchaudio torchcodec; do
        if $pip show --quiet "$package" 2>/dev/null && ! "$venv/bin/python" -c "import $package" >>"$log" 2>&1; then
            $pip uninstall --quiet --yes "$package" >>"$log" 2>&1
            say "removed $package: it does not import beside this torch, and mrl does not need it"
        fi
    done
}

say "setting up $venv for $platform with Python $version ($python)"
[ -x "$venv/bin/python" ] && $pip --version >/dev/null 2>&1 || step "making $venv" "$python" -m venv "$venv"
"install_$platform"
remove_unusable
step "checking that it imports" "$venv/bin/python" -c 'import torch, transformers, megatron.core, vllm, mrl.cli'

printf '%s' "$key" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
rm -f "$building"
say "ready in $((SECONDS - began)) s; next: make demo, or $venv/bin/mrl train configs/demo.yaml"
