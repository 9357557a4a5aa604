#!/usr/bin/env bash
# The check on a machine with a GPU, in two halves, as such a machine may have neither Go nor a network.
#
#   scripts/gpu-check.sh build DIR       where Go is: builds what is needed into DIR, and copies itself there
#   DIR/gpu-check.sh run [OUT.json]      where the GPU is: tests and measures, and prints one JSON document
#
# run needs bash, the usual small programs (mktemp, rm, gzip) and NVIDIA's driver. The document goes to OUT.json, too, and the logs of all
# steps into the directory OUT.logs beside it (gpu-check.logs here, without OUT.json). Status: 0 all passed, 1 a
# step failed or there was no time for it (the document says which), 2 wrong use, 3 there is no GPU.
#
#   GPU_CHECK_SMALL=1    small sizes: to try the script itself on the emulator, whose figures mean nothing
#   GPU_CHECK_DISK=DIR   where to spill, in place of the temporary directory: 32 GB should be free there, half of which is used
#   GPU_CHECK_PLAIN=1    build: leave the binaries uncompressed, for machines without gzip
#
# build adds the test with gorgonia.org/cu if there is a C compiler and it finds, or can fetch, NVIDIA's
# header (see gorgonia-check.sh). That binary needs glibc 2.34 or newer. run leaves the step out where
# the binary is not in DIR.
#
# It changes nothing about the GPU: no clocks, modes or MIG.
set -uo pipefail
export LC_ALL=C

tests=(internal/cuda tier/cuda convert convert/cdevice test)

# The tests of convert that have a part for CUDA. Others would run whole, or wait for parts of theirs that are left out.
gpu_tests='AdoptTable(Faults|RefusesNonsense)|Clone|ColumnsOfEveryType|DigestIsTheSameEverywhere|ForeignTable(BecomesTheSameImage|Lacks)|IngestIntoEveryTier'
gpu_tests+='|Large(TableIsPacked|Tables)|RoomInOnePiece|ShapeOfLongArrays|SharedMemoryIsChargedOnce|Table(IsOneCopy|MoveIsCancelled|sOfEveryTypeArePacked)'

# binary names the test binary of a package.
binary() {
	echo "${1//\//-}.test"
}

usage() {
	sed -n '4,5s/^#   //p' "${BASH_SOURCE[0]}" >&2
	exit 2
}

# ---- build ----

build() {
	local dir=$1 p
	set -e
	cd "$(dirname "${BASH_SOURCE[0]}")/.."
	case $dir in /*) ;; *) dir=$OLDPWD/$dir ;; esac
	mkdir -p "$dir"
	local flags=(-trimpath -buildvcs=auto '-ldflags=-s -w')
	for p in "${tests[@]}"; do
		CGO_ENABLED=0 go test -c "${flags[@]}" -o "$dir/$(binary "$p")" "./$p"
	done
	CGO_ENABLED=0 go build "${flags[@]}" -o "$dir/spillbench" ./cmd/spillbench
	scripts/gorgonia-check.sh build "$dir"
	if [ -z "${GPU_CHECK_PLAIN:-}" ]; then
		gzip -f -5 "$dir"/*.test "$dir"/spillbench
	fi
	cp "scripts/gpu-check.sh" "$dir/"
	local commit
	commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
	[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit+=+dirty
	echo "$commit" >"$dir/commit"
	du -sh "$dir"
}

# ---- run ----

# now puts the time in microseconds into $reply.
now() {
	if [ -n "${EPOCHREALTIME:-}" ]; then
		reply=${EPOCHREALTIME/./}
	else
		reply=$((SECONDS * 1000000))
	fi
}

# nap waits for so many seconds, without a program.
nap() { read -rt "$1" -u "$idle" || true; }

# quote puts $1 as a JSON string into $reply. What is not ASCII becomes a question mark.
quote() {
	local s=$1
	s=${s//\\/\\\\}
	s=${s//\"/\\\"}
	s=${s//$'\t'/ }
	reply=\"${s//[^ -~]/?}\"
}

# pick puts the text, or the number, that a JSON document $2 has first for the key $1 into $reply.
pick() {
	reply=
	if [[ $2 =~ \"$1\":\ *\"([^\"]*)\" ]] || [[ $2 =~ \"$1\":\ *([0-9.]+) ]]; then
		reply=${BASH_REMATCH[1]}
	fi
}

# program puts how to call a binary into $reply, unpacked if need be; status 1 if there is none.
program() {
	reply=$here/$1
	[ -x "$reply" ] && return
	reply=$work/$1
	[ -x "$reply" ] && return
	[ -f "$here/$1.gz" ] || return 1
	gzip -dc "$here/$1.gz" >"$reply" && chmod +x "$reply"
}

# bounded runs a command for at most so many seconds. Its output goes to a log, and its status, 124 if it took too
# long, into $status.
bounded() {
	local limit=$1 log=$2 pid end
	shift 2
	"$@" >"$log" 2>&1 </dev/null &
	pid=$!
	child=$pid
	end=$((SECONDS + limit))
	while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do nap 0.1; done
	if ! kill -0 "$pid" 2>/dev/null; then
		wait "$pid"
		status=$?
		child=
		return
	fi
	kill -TERM "$pid" 2>/dev/null
	end=$((SECONDS + 5))
	while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do nap 0.1; done
	kill -KILL "$pid" 2>/dev/null
	end=$((SECONDS + 5))
	while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do nap 0.1; done
	kill -0 "$pid" 2>/dev/null || wait "$pid" 2>/dev/null # what hangs in the kernel's driver is left to itself
	child=
	status=124
}

# step NAME KIND SECONDS PROGRAM ARGUMENT... runs one step and adds what came of it to the document. KIND: test and bench
# are a test binary's; json and facts write a document to the file $json. That of facts says more of the machine than
# others need to know, such as what is mounted: it stays with the logs.
step() {
	local name=$1 kind=$2 limit=$3 called=$4 left=$((deadline - SECONDS)) log=$logs/$1.log begun took result=null lines=() line
	local -i passed=0 failed=0 skipped=0
	shift 4
	[ "$limit" -le "$left" ] || limit=$left
	json=$logs/$name.json
	local args=("${@//@JSON/"$json"}")
	case $kind in
	test) args+=(-test.v -test.count=1 "-test.timeout=$((limit > 8 ? limit - 4 : 4))s") ;;
	bench) args+=(-test.run=none -test.benchmem "-test.timeout=$((limit > 8 ? limit - 4 : 4))s") ;;
	esac
	now
	begun=$reply
	if [ "$left" -lt 5 ]; then
		status=125
		echo "there was no time left for it" >"$log"
	elif ! program "$called"; then
		status=127
		echo "$called is not here" >"$log"
	else
		echo "gpu-check: $name (at most $limit s)" >&2
		bounded "$limit" "$log" "$reply" "${args[@]}"
	fi
	now
	took=$((reply - begun))
	[ "$status" = 0 ] || worst=1

	local benchmarks=()
	while IFS= read -r line || [ -n "$line" ]; do
		case $line in
		*'--- PASS: '*) passed+=1 ;;
		*'--- FAIL: '*) failed+=1 ;;
		*'--- SKIP: '*) skipped+=1 ;;
		Benchmark*' ns/op'*) benchmarks+=("$line") ;;
		esac
		[ "$status" = 0 ] && continue
		case $line in *'--- PASS: '* | '=== '* | *'--- SKIP: '*) continue ;; esac
		lines+=("${line:0:300}")
		# The first say what failed, or what hung, and the last what became of it.
		[ ${#lines[@]} -le 40 ] || lines=("${lines[@]:0:20}" "${lines[@]:21}")
	done <"$log"
	document=
	if [[ $kind == json || $kind == facts ]] && [ -s "$json" ]; then
		document=$(<"$json")
		[[ $document == '{'*'}' ]] && result=$document || document=
	fi

	local text
	quote "$name" && text="    {\"name\": $reply"
	quote "$called ${args[*]}" && text+=", \"command\": $reply"
	text+=", \"status\": $status, \"timed_out\": $([ "$status" = 124 ] && echo true || echo false)"
	text+=", \"seconds\": $((took / 1000000)).$(printf %03d $((took / 1000 % 1000)))"
	[ "$kind" != test ] || text+=", \"passed\": $passed, \"failed\": $failed, \"skipped\": $skipped"
	strings "${lines[@]}" && text+=", \"closing_lines\": $reply"
	[ "$kind" != bench ] || { strings "${benchmarks[@]}" && text+=", \"benchmarks\": $reply"; }
	[ "$kind" != json ] || text+=", \"result\": $result"
	steps+=("$text}")
}

# strings puts a JSON array of its arguments into $reply.
strings() {
	local all= s
	for s in "$@"; do
		quote "$s"
		all+=${all:+, }$reply
	done
	reply="[$all]"
}

# driver_version puts NVIDIA's version of its driver into $reply.
driver_version() {
	local line=
	reply=
	[ -r /proc/driver/nvidia/version ] && read -r line </proc/driver/nvidia/version
	[[ $line =~ \ ([0-9]+\.[0-9.]+)\  ]] && reply=${BASH_REMATCH[1]}
	if [ -z "$reply" ] && command -v nvidia-smi >/dev/null; then
		bounded 20 "$work/smi.log" nvidia-smi --query-gpu=driver_version --format=csv,noheader
		[ "$status" != 0 ] || read -r reply <"$work/smi.log" || true
	fi
}

# machine puts what is known of the host into $reply.
machine() {
	local -i cores=0 memory=0
	local cpu= kernel= line
	while IFS= read -r line; do
		case $line in
		processor*) cores+=1 ;;
		'model name'*) cpu=${line#*: } ;;
		esac
	done </proc/cpuinfo
	while read -r line; do
		[[ $line =~ ^MemTotal:\ *([0-9]+) ]] && memory=$((BASH_REMATCH[1] * 1024))
	done </proc/meminfo
	read -r kernel </proc/sys/kernel/osrelease
	quote "$cpu" && line="{\"cpu\": $reply, \"cores\": $cores, \"memory_bytes\": $memory"
	quote "$kernel" && reply="$line, \"kernel\": $reply}"
}

run() {
	local out=${1:-} when probe topo= host name cuda link emulator=false text disk=()
	here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
	[ -f "$here/commit" ] || { echo "gpu-check: $here was not made by gpu-check.sh build" >&2; exit 2; }
	work=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX") || exit 2
	child=
	trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null; rm -rf "$work"' EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM
	exec {idle}<> <(:) # from which nothing ever comes
	unset SPILLWAY_GPU_MEMORY_LIMIT SPILLWAY_GPU_QUOTA_DIR

	# What nothing is known of is no GPU: a run that takes no time says so.
	status=0
	if ! program spillbench; then
		echo "gpu-check: spillbench is not in $here, or cannot be unpacked" >&2
		exit 2
	fi
	bounded 60 "$work/probe.log" "$reply" run --gpu cuda --gpu-memory 1MiB --host-memory 1MiB --quiet --json "$work/probe.json"
	if [ "$status" = 3 ]; then
		read -r text <"$work/probe.log"
		echo "gpu-check: there is no GPU to test on: $text" >&2
		exit 3
	fi
	probe=$([ ! -s "$work/probe.json" ] || echo "$(<"$work/probe.json")")

	logs=gpu-check.logs
	[ -z "$out" ] || logs=${out%.json}.logs
	mkdir -p "$logs" || exit 2
	rm -f "$logs"/*.log "$logs"/*.json # of a check before
	logs=$(cd "$logs" && pwd)
	cp "$work/probe.log" "$logs/probe.log"
	TZ=UTC printf -v when '%(%Y-%m-%dT%H:%M:%SZ)T' -1
	steps=()
	worst=0
	deadline=$((SECONDS + 440))
	export SPILLWAY_CUDA=real
	[ -z "${GPU_CHECK_DISK:-}" ] || disk=(--disk "$GPU_CHECK_DISK")

	step topo facts 30 spillbench topo --quiet --json @JSON
	topo=$document
	if program tier-cuda-gorgonia.test; then
		step gorgonia test 60 tier-cuda-gorgonia.test '-test.run=^(TestReal|Example)'
	fi
	if [ -n "${GPU_CHECK_SMALL:-}" ]; then
		step tier-cuda test 60 tier-cuda.test '-test.run=^TestReal' -test.short
		step internal-cuda test 30 internal-cuda.test '-test.run=^TestReal'
		step bandwidth json 30 spillbench bandwidth --gpu cuda --gpu-memory 32MiB --host-memory 32MiB --sizes 1MiB,4MiB --threads 1,2 --between gpu,host --quiet --json @JSON
		step run json 60 spillbench run --gpu cuda --gpu-memory 16MiB --host-memory 16MiB "${disk[@]}" --quiet --json @JSON
		step scenarios test 60 test.test '-test.run=^TestReal' -test.short
		step convert test 60 convert.test '-test.run=^(TestColumnsOfEveryType|TestDigestIsTheSameEverywhere|TestTableIsOneCopy)$/^cuda' -test.short
		step cdevice test 30 convert-cdevice.test -test.short
		step bench-tier-cuda bench 30 tier-cuda.test '-test.bench=^BenchmarkReal/.*/1MiB' -test.benchtime=5x
	else
		step tier-cuda test 90 tier-cuda.test '-test.run=^TestReal'
		step internal-cuda test 40 internal-cuda.test '-test.run=^TestReal'
		step bandwidth json 90 spillbench bandwidth --gpu cuda --gpu-memory 4GiB --host-memory 4GiB --sizes 1MiB,16MiB,64MiB,256MiB --threads 1,2 --between gpu,host --quiet --json @JSON
		# A table three times as large as both memories: 18 GiB.
		step run json 180 spillbench run --gpu cuda --gpu-memory 2GiB --host-memory 4GiB "${disk[@]}" --quiet --json @JSON
		step scenarios test 60 test.test '-test.run=^TestReal'
		step convert test 90 convert.test "-test.run=^Test($gpu_tests)\$/^cuda"
		step cdevice test 30 convert-cdevice.test
		step bench-internal-cuda bench 40 internal-cuda.test '-test.bench=^BenchmarkReal' -test.benchtime=300ms
		step bench-tier-cuda bench 60 tier-cuda.test '-test.bench=^BenchmarkReal' -test.benchtime=300ms
		step bandwidth-disk json 90 spillbench bandwidth --gpu cuda --gpu-memory 1GiB --host-memory 1GiB --sizes 64MiB --threads 1 --codec none "${disk[@]}" --quiet --json @JSON
	fi

	pick gpu "$probe"
	[ -n "$reply" ] || pick gpu "$topo" # the engine did not open it
	name=$reply
	case $name in *[Ee]mulat*) emulator=true ;; esac
	pick driver "$probe"
	cuda=${reply#CUDA }
	pick pcie_link "${topo:-$probe}"
	link=$reply
	machine
	host=$reply
	driver_version
	quote "$reply" && text="{\"name\": @NAME, \"driver\": $reply"
	quote "$cuda" && text+=", \"cuda\": $reply"
	quote "$link" && text+=", \"pcie_link\": $reply}"
	quote "$name" && text=${text/@NAME/"$reply"}
	local all= s document commit
	for s in "${steps[@]}"; do all+=${all:+,$'\n'}$s; done
	read -r commit <"$here/commit"
	quote "$commit"
	printf -v document '{\n  "schema": "spillway.gpu-check/v1",\n  "date": "%s",\n  "commit": %s,\n  "small": %s,\n  "emulator": %s,\n  "host": %s,\n  "device": %s,\n  "seconds": %d,\n  "steps": [\n%s\n  ]\n}' \
		"$when" "$reply" "$([ -n "${GPU_CHECK_SMALL:-}" ] && echo true || echo false)" "$emulator" "$host" "$text" "$SECONDS" "$all"
	printf '%s\n' "$document"
	[ -z "$out" ] || printf '%s\n' "$document" >"$out" || worst=1
	exit "$worst"
}

case ${1:-}:$# in
build:2) build "$2" ;;
run:1 | run:2) run "${2:-}" ;;
*) usage ;;
esac
