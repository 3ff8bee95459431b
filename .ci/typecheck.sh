#!/usr/bin/env bash
# Checks the types of the wheel as a user gets it. Type checkers do not follow setuptools' package-dir mapping, so the
# wheel is built from a clean copy, unpacked into an empty folder and checked there.
# usage: .ci/typecheck.sh [python [program.py]]   (a Python with the extra `lint` and the library's dependencies)
# With a program, that is checked against the wheel instead of the wheel itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
top=$PWD
python=$(command -v "${1:-python3}") || { echo "no such Python: ${1:-python3}" >&2; exit 2; }
[[ $python == /* ]] || python=$top/$python
program=${2:+$(realpath "$2")}
folders=(functional_ds comm transforms)

room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
mkdir "$room/source" "$room/wheel" "$room/site"

# A copy: setuptools would leave build/ here, and files deleted since would come back from it.
cp -R pyproject.toml README.md LICENSE "${folders[@]}" "$room/source"
"$python" -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir "$room/wheel" "$room/source"
"$python" -m zipfile -e "$room"/wheel/*.whl "$room/site"

sources() { (cd "$1" && find . \( -name '*.py' -o -name '*.toml' -o -name py.typed \) | sort); }
for folder in "${folders[@]}"; do
  target=functional_ds/$folder
  [[ $folder != functional_ds ]] || target=functional_ds
  missing=$(comm -23 <(sources "$folder") <(sources "$room/site/$target"))
  if [[ -n $missing ]]; then
    echo "the wheel lacks these files of $folder/ (list their package in pyproject.toml):" >&2
    echo "$missing" >&2
    exit 1
  fi
done

cd "$room/site"
if [[ -n $program ]]; then
  cp "$program" .
  "$python" -m mypy --config-file "$top/pyproject.toml" --cache-dir "$top/.mypy_cache" "$(basename "$program")"
  exit
fi

# Names in the messages are those of the checkout, not of the wheel.
"$python" -m mypy --config-file "$top/pyproject.toml" --cache-dir "$top/.mypy_cache" -p functional_ds |
  sed -E 's#^functional_ds/(comm|transforms)/#\1/#'
