package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The command as a node runs it, without a kubelet: it serves its sockets, describes the GPUs, says on
// /healthz that it is not registered, and ends with nothing left.
func TestRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	kubelet, cdi := t.TempDir(), filepath.Join(t.TempDir(), "cdi")
	plugins := filepath.Join(kubelet, "device-plugins")
	if err := os.Mkdir(plugins, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // for a port that is free
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var stdout, stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- Main(ctx, []string{"--sim", "2x1Gi", "--dir", filepath.Join(t.TempDir(), "node"), "--kubelet-dir", kubelet,
			"--cdi-dir", cdi, "--metrics", address}, &stdout, &stderr)
	}()
	ask := func(path string) (int, string) {
		r, err := http.Get("http://" + address + path)
		if err != nil {
			return 0, err.Error()
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return 0, err.Error()
		}
		return r.StatusCode, string(body)
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		status, body := ask("/healthz")
		if status == http.StatusServiceUnavailable && strings.Contains(body, "does not run") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(status, body)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if _, body := ask(
		"/metrics",
	); !strings.Contains(
		body,
		`spillway_gpu_memory_advertised_bytes{gpu="sim-1"} 1.073741824e+09`,
	) {
		t.Error(body)
	}
	for { // the page is served before the plugins have started
		sockets, err := filepath.Glob(plugins + "/*.sock")
		files, errOfDir := os.ReadDir(cdi)
		if err == nil && errOfDir == nil && len(sockets) == 3 && len(files) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v, %v; %v, %v", sockets, err, files, errOfDir)
		}
		time.Sleep(5 * time.Millisecond)
	}
	cancel()
	if status := <-ended; status != 0 || stdout.Len() > 0 {
		t.Errorf("status %d: %s%s", status, &stdout, &stderr)
	}
	if left, err := os.ReadDir(plugins); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

// What the machine lacks is one line, and says what to do.
func TestRunFails(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	open := t.TempDir()
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no NVML":            {[]string{"--nvml", "/none.so"}, "or offer simulated GPUs by --sim"},
		"no kubelet":         {[]string{"--sim", "1x1Gi", "--kubelet-dir", "/none"}, "is it mounted? see --kubelet-dir"},
		"too small a GPU":    {[]string{"--sim", "1x100Mi"}, "choose a smaller unit"},
		"too many units":     {[]string{"--sim", "64x1Ti", "--unit", "1Mi"}, "use --unit "},
		"no API server":      {[]string{"--mode", "dra", "--sim", "1x1Gi", "--node", "n", "--cdi-dir", filepath.Join(t.TempDir(), "cdi")}, "name a file by --kubeconfig"},
		"no kubeconfig":      {[]string{"--mode", "dra", "--sim", "1x1Gi", "--node", "n", "--cdi-dir", filepath.Join(t.TempDir(), "cdi"), "--kubeconfig", "/none"}, "see --kubeconfig"},
		"others can replace": {[]string{"--sim", "1x1Gi", "--dir", filepath.Join(open, "node")}, "written to by others"},
	} {
		args := append([]string{"--dir", filepath.Join(t.TempDir(), "node"), "--metrics", ""}, c.args...)
		var stdout, stderr bytes.Buffer
		status := Main(t.Context(), args, &stdout, &stderr)
		lines := strings.Split(strings.TrimSuffix(stderr.String(), "\n"), "\n")
		if last := lines[len(lines)-1]; status != 1 || !strings.HasPrefix(last, "spillway-device-plugin: ") ||
			!strings.Contains(last, c.want) {
			t.Errorf("%s: status %d: %s", name, status, &stderr)
		}
	}
}
