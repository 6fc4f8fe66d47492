#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes or completes the virtual environment. Cheap when there is nothing to do; goes on where an interrupted call stopped.
#
#   scripts/bootstrap.sh            environment variables: VENV (.venv), EXTRAS (cpu,test,dev), PYTHON (chosen if empty)
#
# The stamp inside the environment holds what was installed: its extras, its path and a digest of pyproject.toml. It is
# written last, so it is there only when everything is.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-cpu,test,dev}
PYTHON=${PYTHON:-}

say() { echo "[bootstrap] $*"; }
die() { echo "[bootstrap] error: $*" >&2; exit 1; }

in_range() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

choose_python() {
    if [ -n "$PYTHON" ]; then
        in_range "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12 that runs ($("$PYTHON" --version 2>&1 || true))"
        return
    fi
    for PYTHON in python3 python3.11 python3.12 python3.10; do
        if in_range "$PYTHON"; then return; fi
    done
    die "no Python 3.10, 3.11 or 3.12 found (python3 is $(python3 --version 2>&1 || true)); name one: make PYTHON=/path/to/python3.11"
}

stamp_text() {
    digest=$("$VENV/bin/python" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')
    echo "$(pwd -P)/$VENV [$EXTRAS] $digest"
}

minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Scripts in an environment name its path: after a move they start the wrong Python, or none.
moved() { [ -s "$STAMP" ] && ! grep -qF "$(pwd -P)/$VENV [" "$STAMP"; }

# A folder that is no working environment (cut off while it was made, or its Python is gone) is useless: start over.
healthy() { in_range "$VENV/bin/python" && "$VENV/bin/python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; }

make_venv() {
    choose_python
    say "making $VENV with $("$PYTHON" --version 2>&1)"
    rm -rf "$VENV"
    # Without ensurepip (Debian without python3-venv) the system's pip can still fill an environment.
    "$PYTHON" -m venv "$VENV" 2>/dev/null || {
        rm -rf "$VENV"
        "$PYTHON" -m venv --without-pip "$VENV" 2>/dev/null && "$PYTHON" -m pip --version >/dev/null 2>&1 \
            || { rm -rf "$VENV"; die "'$PYTHON -m venv' does not work; install the venv module (Debian: python3-venv) or choose another PYTHON"; }
    }
}

install_uv() {
    if "$VENV/bin/uv" --version >/dev/null 2>&1; then return; fi
    say "installing uv"
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$VENV/bin/python" -m pip install -q --disable-pip-version-check uv
    else
        [ -n "$PYTHON" ] || choose_python
        "$PYTHON" -m pip --python "$VENV/bin/python" install -q --disable-pip-version-check uv
    fi
}

install_packages() {
    again=
    if [ -e "$VENV/.war-rl-installing" ]; then
        say "an earlier install was interrupted: doing it again"
        again=--reinstall
    fi
    touch "$VENV/.war-rl-installing"
    command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || say "warning: no C++ compiler found; arctic-inference is built from source (Debian: g++)"
    say "installing .[$EXTRAS] (about 6 GB the first time)"
    # uv reads the overrides in pyproject.toml, which pip cannot.
    # Bytecode: a run starts some twenty Python processes that import torch; where writing it at run time is switched off
    # (PYTHONDONTWRITEBYTECODE), each of them would compile everything again.
    # shellcheck disable=SC2086
    UV_LINK_MODE=${UV_LINK_MODE:-hardlink} "$VENV/bin/uv" pip install -q --compile-bytecode --python "$VENV/bin/python" $again -e ".[$EXTRAS]"
    "$VENV/bin/python" -c 'import war_rl'
}

STAMP=$VENV/.war-rl-stamp
[ -z "$PYTHON" ] || choose_python
if healthy && ! moved && { [ -z "$PYTHON" ] || [ "$(minor "$PYTHON")" = "$(minor "$VENV/bin/python")" ]; }; then
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$(stamp_text)" ]; then exit 0; fi
elif healthy && ! moved; then
    make_venv
else
    [ ! -e "$VENV" ] || say "$VENV is not a working environment: making it again"
    make_venv
fi
rm -f "$STAMP"
install_uv
install_packages
rm -f "$VENV/.war-rl-installing"
stamp_text > "$STAMP.part"
mv "$STAMP.part" "$STAMP"
say "ready: $VENV"
