#!/usr/bin/env bash
# Builds and tests the module with the tag gorgonia, by which internal/cuda calls the driver through
# gorgonia.org/cu: against the emulator, so no GPU is needed. cu wants NVIDIA's cuda.h, of CUDA 11 or 12; where it is neither
# found nor can be fetched, the check is skipped. Leaves nothing behind but what Go caches.
set -euo pipefail
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

# member writes that member of a .deb on its standard input whose name begins so.
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

# fetch_header takes the header out of Debian's package, from the mirror that apt is set to, with lists
# of its own so that apt's stay as they are. Of the package's 770 MB the first million bytes hold it.
# They are not enough for apt to check what it knows of the whole, so the header is checked by itself.
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
	# The archive is cut off, of which xz and tar complain when they are past the header.
	curl -sfL --max-time 60 -r 0-1999999 "$uri" 2>/dev/null | head -c 2000000 | member data.tar.xz |
		xz -dcq 2>/dev/null | tar -xO --occurrence=1 ./usr/include/cuda.h 2>/dev/null >"$own/include/cuda.h" || true
	echo "$sum  $own/include/cuda.h" | sha256sum --status -c
}

include=$(find_header) || {
	fetch_header || skip "there is no cuda.h of CUDA 11 or 12, and none can be fetched"
	include=$own/include
}

# What cu is linked with: all functions that the header declares, none of which is ever called.
mkdir "$own/lib" "$own/stub"
"$cc" -E -P "$include/cuda.h" | grep -oE '\bcu[A-Z][A-Za-z0-9_]*[[:space:]]*\(' | tr -d ' \t(' | sort -u |
	sed 's/.*/void &(void) {}/' >"$own/stub/stub.c"
"$cc" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$own/stub/libcuda.so" "$own/stub/stub.c"
# What it runs with has only those that the module calls. The others stay unresolved until they would be called.
"$cc" -shared -fPIC -O2 -Wall -pthread -fvisibility=hidden -Wl,-soname,libcuda.so.1 \
	-o "$own/lib/libcuda.so.1" internal/cuda/cudatest/testdata/emulator/*.c
unset LD_BIND_NOW
export CGO_ENABLED=1 CPATH=$include LIBRARY_PATH=$own/stub CGO_LDFLAGS="-O2 -g -Wl,-z,lazy"
# Go does not know of those paths. The name of the header is for its cache: what was compiled with another is not taken.
CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations -DSPILLWAY_CUDA_H=$(sha256sum <"$include/cuda.h" | cut -c 1-16)"
export CGO_CFLAGS

go vet -tags gorgonia ./internal/cuda/...
go build -tags gorgonia ./...
LD_LIBRARY_PATH=$own/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} go test -tags gorgonia ./internal/cuda/...
