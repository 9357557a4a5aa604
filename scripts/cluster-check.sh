#!/usr/bin/env bash
# Builds what deploy/Containerfile builds, and tests the device plugin and the DRA driver against
# Kubernetes' own etcd, API server, scheduler and kubelet.
#
#   scripts/cluster-check.sh
#
# It needs Go and a C compiler, and downloads the modules of Kubernetes once. It needs no container
# engine. Without root the tests that need root are skipped. It leaves nothing behind but Go's caches.
set -euo pipefail
[ $# = 0 ] || { sed -n '5s/^#   //p' "${BASH_SOURCE[0]}" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

own=$(mktemp -d "${TMPDIR:-/tmp}/spillway-cluster.XXXXXX")
trap 'rm -rf "$own"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The Containerfile's build commands run as they are written, with another directory for the programs.
mapfile -t builds < <(sed -n 's/^RUN //p' deploy/Containerfile)
if [ ${#builds[@]} != 2 ]; then
	echo "deploy/Containerfile has ${#builds[@]} RUN lines, want 2: one for each program" >&2
	exit 1
fi
for build in "${builds[@]}"; do
	sh -c "${build//\/out\//$own/}"
done
for program in spillway-device-plugin spillbench; do
	help=$("$own/$program" --help)
	if [[ $help != *Usage:* ]]; then
		printf '%s --help does not print its usage:\n%s\n' "$program" "$help" >&2
		exit 1
	fi
done

# With cgo and trimmed paths, as in the image, so that Go compiles Kubernetes' packages once for all of
# this. The tests read files outside of their module, which Go's cache of test results does not see. The
# API server's test library looks for its files below the last two variables.
TEST_SRCDIR=$(go env GOMODCACHE)
export CGO_ENABLED=1 GOFLAGS="${GOFLAGS:-} -trimpath" TEST_SRCDIR TEST_WORKSPACE=.
go -C cmd/spillway-device-plugin/test/cluster vet ./...
go -C cmd/spillway-device-plugin/test/cluster test -vet=off -count=1 ./...
