#!/usr/bin/env bash
# Sets one Python environment up, from an empty machine to compiled extension: system packages, virtual environment,
# torch (first and alone), the other pinned packages, our extension, DeepSpeed's CPU ops. Each step leaves a stamp with
# the hash of what it depends on, so a second call ends in a fraction of a second. The system Python is left alone.
#
# usage: setup.sh ENVIRONMENT_DIR CONSTRAINTS EXTRAS     (from the top of the checkout; EXTRAS as in pip: a,b,c)
# Reads: PYTHON (interpreter to use), MEMASCEND_CACHE (compiled DeepSpeed ops; default: the user's cache directory),
#        MAX_JOBS (compiler processes; default: one per core), NO_SYSTEM_PACKAGES=1 (never call apt-get).
#        LOCKED=1 (install the very files that locks/ lists, by SHA-256, or stop),
#        MEMASCEND_CPU_LEVEL (x86-64-v2, -v3 or -v4: DeepSpeed's ops for any such processor; default: this one).
set -euo pipefail

readonly environment=$1 constraints=$2 extras=$3
readonly log=.cache/setup.log
readonly torch_cpu_index=https://download.pytorch.org/whl/cpu
export MAX_JOBS=${MAX_JOBS:-$(nproc)}

fail() {
    echo "setup: $*" >&2
    exit 1
}

# logged WHAT COMMAND...: runs it, keeps what it prints in the log, shows the end of that only when it fails.
logged() {
    local what=$1 start=$SECONDS from
    shift
    printf 'setup: %s ... ' "$what"
    printf '\n== %s\n%s\n' "$what" "$*" >>"$log"
    from=$(wc -c <"$log")
    if ! "$@" >>"$log" 2>&1; then
        echo "failed"
        tail -c "+$from" "$log" | grep -v 'is ignored: it is either a non-existing path' | tail -n 25 >&2
        fail "$what failed; the whole output is in $log"
    fi
    echo "$((SECONDS - start)) s"
    worked=yes
}

# Hash of the words and files given; a stamp is fresh when it holds that hash.
digest() {
    { printf '%s\n' "$PWD" "$@"; cat -- "${files[@]}"; } | sha256sum | cut -d' ' -f1
}

fresh() {
    [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]
}

missing_system_packages() {
    needed=() useful=()
    command -v "${CXX:-g++}" >/dev/null || needed+=(g++)
    if ! echo '#include <libaio.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; then needed+=(libaio-dev); fi
    if ! echo '#include <numa.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; then useful+=(libnuma-dev); fi
    command -v fio >/dev/null || useful+=(fio)
    command -v dot >/dev/null || useful+=(graphviz)
    # Tests of checkpoints on file systems with reflinks, which only root can mount: 0.8 and 1.0 MB.
    [ "$(id -u)" != 0 ] || command -v mkfs.btrfs >/dev/null || useful+=(btrfs-progs)
    [ "$(id -u)" != 0 ] || command -v mkfs.xfs >/dev/null || useful+=(xfsprogs)
    # Tests of the report in a browser: 77 MB.
    [ "$(id -u)" != 0 ] || command -v chromium chromium-browser google-chrome >/dev/null || useful+=(chromium)
    if [ ! -x "$environment/bin/python" ] && [ -z "$(find_python)" ]; then
        # Debian leaves pip's bootstrap and the C headers out of python3.
        needed+=(python3-venv python3-dev)
    fi
}

# First interpreter of Python 3.11 to 3.13 that can make an environment and compile extensions.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if "$candidate" - >/dev/null 2>&1 <<'PYTHON'; then
import ensurepip, os, sys, sysconfig, venv
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
PYTHON
            command -v "$candidate"
            return
        fi
    done
}

install_system_packages() {
    local needed useful install=() packages
    missing_system_packages
    packages=("${needed[@]}" "${useful[@]}")
    [ ${#packages[@]} -gt 0 ] || return 0
    if command -v apt-get >/dev/null && [ -z "${NO_SYSTEM_PACKAGES:-}" ]; then
        if [ "$(id -u)" = 0 ]; then
            install=(env)
        elif sudo -n true 2>/dev/null; then
            install=(sudo -n env)
        fi
    fi
    if [ ${#install[@]} -gt 0 ]; then
        install+=(DEBIAN_FRONTEND=noninteractive apt-get)
        logged "system packages ${packages[*]}" apt_install
        missing_system_packages
        [ ${#needed[@]} -eq 0 ] || fail "still missing after the installation: ${needed[*]} (Python 3.11 to 3.13 is needed)"
        return 0
    fi
    local command="sudo apt-get install -y ${packages[*]}"
    [ ${#needed[@]} -eq 0 ] || fail "missing: ${needed[*]}. Install with: $command"
    echo "setup: not installed (only some benchmarks, drawings and tests need them): ${useful[*]}. Install with: $command"
}

apt_install() {
    "${install[@]}" install -y -qq --no-install-recommends "${packages[@]}" && return
    "${install[@]}" update -qq
    "${install[@]}" install -y -qq --no-install-recommends "${packages[@]}"
}

make_environment() {
    if "$environment/bin/python" -c 'import pip' >/dev/null 2>&1; then return 0; fi
    local python
    python=$(find_python)
    [ -n "$python" ] || fail "no Python 3.11 to 3.13 with venv and headers found; install one, or name it: make PYTHON=/path/to/python3"
    logged "virtual environment $environment ($("$python" --version))" "$python" -m venv --clear "$environment"
}

# Without an NVIDIA device the CPU build saves gigabytes; its index is used where it can be reached.
torch_source() {
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then return 0; fi
    if "$environment/bin/python" - "$torch_cpu_index/torch/" >/dev/null 2>&1 <<'PYTHON'; then
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
        echo "--extra-index-url $torch_cpu_index"
    fi
}

pip_install() {
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-input --no-build-isolation "$@"
}

# The checkout goes onto sys.path by a .pth file. setuptools' default, a finder, is asked last: in the folder
# that holds the checkout, "import memascend" would find the checkout itself as an empty namespace package.
editable=(--config-settings editable_mode=compat)

install_packages() {
    local files=("$constraints") hash
    hash=$(digest torch)
    if ! fresh torch "$hash"; then
        # shellcheck disable=SC2046  # two words on purpose
        logged "torch" pip_install -c "$constraints" $(torch_source) torch
        # What packages without a wheel are built with.
        logged "build tools" pip_install -c "$constraints" setuptools wheel packaging ninja
        echo "$hash" >"$stamps/torch"
    fi
    files=("$constraints" pyproject.toml)
    hash=$(digest "$extras" ${LOCKED:+"locked"})
    if ! fresh packages "$hash"; then
        [ -z "${LOCKED:-}" ] || install_locked
        logged "packages [$extras], and the extension" pip_install -c "$constraints" "${editable[@]}" -e ".[$extras]"
        echo "$hash" >"$stamps/packages"
        extension_hash >"$stamps/extension"
    fi
}

# The files of locks/, or none: what pip finds afterwards is all there. torch, and what it brought, come by version.
install_locked() {
    local name words=()
    for name in core ${extras//,/ }; do
        [ -f "locks/$name.txt" ] || fail "LOCKED=1: there is no locks/$name.txt; leave LOCKED out"
        words+=(-r "locks/$name.txt")
    done
    logged "files of locks/ by their SHA-256" pip_install --require-hashes --no-deps "${words[@]}"
}

extension_hash() {
    local files=()
    [ ! -f setup.py ] || mapfile -t files < <(find setup.py memascend/csrc -type f | sort)
    files+=("$stamps/torch")
    digest "$("$environment/bin/python" --version)" "$(compgen -G 'memascend/_C*.so' | sort)"
}

build_extension() {
    if fresh extension "$(extension_hash)"; then return 0; fi
    logged "extension" pip_install --no-deps "${editable[@]}" -e .
    extension_hash >"$stamps/extension"
}

build_ops() {
    case ",$extras," in *,deepspeed,* | *,papers,*) ;; *) return 0 ;; esac
    local files=(workflows/setup/build_ops.py "$stamps/packages") hash
    # What they are compiled for: a level of x86-64 (an image for other machines), else this processor.
    hash=$(digest "${MEMASCEND_CPU_LEVEL:-$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true)}")
    if fresh ops "$hash"; then return 0; fi
    logged "DeepSpeed's CPU ops (compiled once for each version, kept in the user's cache)" \
        "$environment/bin/python" workflows/setup/build_ops.py
    echo "$hash" >"$stamps/ops"
}

[ -f "$constraints" ] || fail "no constraint file $constraints"
mkdir -p .cache 2>/dev/null && [ -w .cache ] && [ -w . ] ||
    fail "this directory is not writable ($PWD); use a checkout of your own"
if command -v flock >/dev/null; then
    exec 9>.cache/setup.lock
    flock -n 9 || { echo "setup: another setup of this checkout is running; waiting for it"; flock 9; }
fi
readonly stamps=$environment/.memascend-stamps
install_system_packages
make_environment
mkdir -p "$stamps"
install_packages
build_extension
build_ops
[ -z "${worked-}" ] || echo "setup: done; use it with: source $environment/bin/activate"
