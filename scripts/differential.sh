#!/usr/bin/env bash
# Runs the programs of test/differential on another commit.
#
#   scripts/differential.sh compare COMMIT [SEEDS]   compares the working tree with COMMIT
#   scripts/differential.sh golden COMMIT [SEEDS]    writes the golden files from COMMIT
#
# COMMIT gets the programs of the working tree and its own adapter, or, if it has none, the first
# one there was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-} commit=${2:-} seeds=${3:-24}
case $what in compare | golden) ;; *) commit='' ;; esac
[ -n "$commit" ] || { sed -n '4,5s/^#  *//p' "${BASH_SOURCE[0]}" >&2 && exit 2; }

own=$(mktemp -d "${TMPDIR:-/tmp}/spillway-differential.XXXXXX")
trap 'rm -rf "$own"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

package=test/differential adapter=test/differential/adapter_test.go
mkdir "$own/tree" "$own/golden"
git archive "$commit" | tar -x -C "$own/tree"
from=$commit
git cat-file -e "$commit:$adapter" 2>/dev/null ||
	from=$(git log --diff-filter=A --format=%H -- "$adapter" | tail -n 1)
mkdir -p "$own/tree/$package"
cp "$package"/*.go "$own/tree/$package/"
git show "$from:$adapter" >"$own/tree/$adapter"

(cd "$own/tree" && go test -count=1 -timeout 60m "./$package" -args -update -golden "$own/golden" -seeds "$seeds")
if [ "$what" = golden ]; then
	cp "$own/golden"/*.golden "$package/testdata/"
else
	go test -count=1 -timeout 60m "./$package" -args -golden "$own/golden" -seeds "$seeds"
fi
