#!/usr/bin/env bash
# Builds and tests tier/cuda/gorgonia, which the build tag gorgonia adds: programs share contexts,
# streams, events and pointers of gorgonia.org/cu with an engine.
#
#   scripts/gorgonia-check.sh             tests it on the emulator, which needs no GPU
#   scripts/gorgonia-check.sh build DIR   builds tier-cuda-gorgonia.test into DIR, for gpu-check.sh
#
# cu needs NVIDIA's cuda.h, of CUDA 11 or 12. Where it is not found and cannot be fetched, the script
# prints the reason and does nothing, with status 0. It leaves nothing behind but Go's caches.
set -euo pipefail
out=
case ${1:-}:$# in
:0) ;;
build:2) out=$(cd "$2" && pwd) ;;
*) sed -n '5,6s/^#   //p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
	echo "skipped: $*"
	exit 0
}

own=$(mktemp -d "${TMPDIR:-/tmp}/spillway-gorgonia.XXXXXX")
trap 'rm -rf "$own"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cc=${CC:-gcc}
command -v "$cc" >/dev/null || skip "there is no C compiler"

# version prints the version of CUDA that a header is for, as the driver counts, or 0.
version() { sed -n 's/^#define CUDA_VERSION \([0-9]*\).*/\1/p' "$1" 2>/dev/null | grep . || echo 0; }

find_header() {
	local dir v
	for dir in "${CUDA_HOME:-/usr/local/cuda}/include" /usr/local/cuda/include /opt/cuda/include /usr/include; do
		v=$(version "$dir/cuda.h")
		if [ "$v" -ge 11000 ] && [ "$v" -lt 13000 ]; then
			echo "$dir"
			return
		fi
	done
	return 1
}

# member NAME writes the first member whose name begins with NAME of the .deb on its standard input.
member() {
	local header size
	head -c 8 >/dev/null
	while header=$(head -c 60) && [ -n "$header" ]; do
		size=$((${header:48:10}))
		if [[ $header == "$1"* ]]; then
			head -c "$size"
			return
		fi
		head -c $((size + size % 2)) >/dev/null
	done
	return 1
}

# fetch_header extracts the header from Debian's package, from the mirror that apt is configured for.
# It has package lists of its own, so apt's stay as they are. The package has 770 MB, and the header
# is within the first two. apt's checksum is of the whole, so the header is checked by one of its own.
fetch_header() {
	local suite=bookworm sum=55639151a971a10c28d627a98dcd406c6320a5b4e5b67dd9d229056ed5c8e045
	local ID='' VERSION_CODENAME='' program mirror uri apt=$own/apt
	for program in apt-get curl xz; do command -v "$program" >/dev/null || return 1; done
	# shellcheck disable=SC1091
	. /etc/os-release
	[ "$ID" = debian ] || return 1
	mirror=$(apt-get update --print-uris 2>/dev/null | sed -n "s|^'\(.*\)/dists/$VERSION_CODENAME/InRelease'.*|\1|p" | head -n 1)
	[ -n "$mirror" ] || return 1
	mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$own/include"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite non-free" >"$apt/sources.list"
	cat >"$apt/apt.conf" <<-END
		Dir::Etc::SourceList "$apt/sources.list";
		Dir::Etc::SourceParts "-";
		Dir::State "$apt/state";
		Dir::State::status "/var/lib/dpkg/status";
		Dir::Cache "$apt/cache";
		Acquire::Languages "none";
		Acquire::Retries "1";
	END
	APT_CONFIG=$apt/apt.conf timeout 60 apt-get update -qq >/dev/null 2>&1 || return 1
	uri=$(APT_CONFIG=$apt/apt.conf apt-get download --print-uris nvidia-cuda-dev 2>/dev/null | sed -n "s|^'\([^']*\)'.*|\1|p")
	[ -n "$uri" ] || return 1
	# The archive is incomplete, so xz and tar fail behind the header.
	curl -sfL --max-time 60 -r 0-1999999 "$uri" 2>/dev/null | head -c 2000000 | member data.tar.xz |
		xz -dcq 2>/dev/null | tar -xO --occurrence=1 ./usr/include/cuda.h 2>/dev/null >"$own/include/cuda.h" || true
	echo "$sum  $own/include/cuda.h" | sha256sum --status -c
}

include=$(find_header) || {
	fetch_header || skip "there is no cuda.h of CUDA 11 or 12, and none can be fetched"
	include=$own/include
}

# The program is linked with a stub that has all functions of the header. They are never called: the
# driver, or the emulator, takes the stub's place when the program runs. The emulator has only the
# functions that the module calls. The others are resolved at their first call, which never comes.
mkdir "$own/lib" "$own/stub"
"$cc" -E -P "$include/cuda.h" | grep -oE '\bcu[A-Z][A-Za-z0-9_]*[[:space:]]*\(' | tr -d ' \t(' | sort -u |
	sed 's/.*/void &(void) {}/' >"$own/stub/stub.c"
"$cc" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$own/stub/libcuda.so" "$own/stub/stub.c"
unset LD_BIND_NOW
export CGO_ENABLED=1 CPATH=$include LIBRARY_PATH=$own/stub CGO_LDFLAGS="-O2 -g -Wl,-z,lazy"
# Go does not know of these paths. The header's checksum is in the flags so that Go does not take an
# object from its cache that was compiled with another header.
CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations -DSPILLWAY_CUDA_H=$(sha256sum <"$include/cuda.h" | cut -c 1-16)"
export CGO_CFLAGS

if [ -n "$out" ]; then
	go test -c -vet=off -tags gorgonia -trimpath -ldflags='-s -w' -o "$out/tier-cuda-gorgonia.test" ./tier/cuda/gorgonia
	exit 0
fi

"$cc" -shared -fPIC -O2 -Wall -pthread -fvisibility=hidden -Wl,-soname,libcuda.so.1 \
	-o "$own/lib/libcuda.so.1" internal/cuda/cudatest/testdata/emulator/*.c
export LD_LIBRARY_PATH=$own/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

go vet -tags gorgonia ./tier/cuda/gorgonia
# The tests of a program share its one emulator, so they run one at a time.
go test -tags gorgonia -vet=off -parallel 1 ./tier/cuda/gorgonia
