package cluster

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// checkout is the root of the repository.
const checkout = "../../../.."

// shellLines returns the command lines of a page's sh blocks, with continued lines joined.
func shellLines(t *testing.T, path string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	joined := strings.ReplaceAll(string(text), "\\\n", " ")
	for _, block := range regexp.MustCompile("(?s)\n```sh\n(.*?)```\n").FindAllStringSubmatch(joined, -1) {
		for line := range strings.Lines(block[1]) {
			if line, _, _ = strings.Cut(strings.TrimSpace(line), " # "); line != "" && line[0] != '#' {
				lines = append(lines, line)
			}
		}
	}
	return lines
}

// TestPage runs the command lines of docs/kubernetes.md in order. Lines with kubectl run as they are
// written, by kubectl itself against the API server. A test has no container engine and no other
// machine, so of the lines that build and copy images it checks that they name existing targets and
// the images that the manifests use. No kubelet runs here: the test reports pods and DaemonSets as
// finished, as a kubelet and a controller would.
func TestPage(t *testing.T) {
	c := newCluster(t)
	bin := t.TempDir()
	kubectl, err := exec.Command("go", "tool", "-n", "kubectl").Output() // builds it; go.mod has the tool
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(strings.TrimSpace(string(kubectl)), filepath.Join(bin, "kubectl")); err != nil {
		t.Fatal(err)
	}
	kubeconfig := c.kubeconfig(c.config)
	images := map[string]bool{} // those that the page builds
	ran := map[string]int{}
	for _, line := range shellLines(t, checkout+"/docs/kubernetes.md") {
		word, _, _ := strings.Cut(line, " ")
		ran[word]++
		switch {
		case word == "podman" && strings.HasPrefix(line, "podman build "):
			images[checkBuild(t, line)] = true
		case slices.Contains([]string{"podman", "kind", "scp", "ssh"}, word):
			for _, image := range regexp.MustCompile(`localhost/[a-z-]+`).FindAllString(line, -1) {
				if !images[image] {
					t.Errorf("%s: the page has not built %s", line, image)
				}
			}
		case strings.HasPrefix(line, "kubectl logs "): // there is no container whose output could be read
			if _, err := c.client.CoreV1().
				Pods("default").
				Get(c.ctx, strings.Fields(line)[2], metav1.GetOptions{}); err != nil {
				t.Errorf("%s: %v", line, err)
			}
		case word == "kubectl" || word == "sed":
			shell := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", line)
			shell.Dir = checkout
			shell.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+bin, "KUBECONFIG="+kubeconfig)
			if out, err := shell.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", line, err, out)
			}
			c.finishAll()
		default:
			t.Errorf("this test cannot run %q", line)
		}
	}
	if ran["kubectl"] < 10 || ran["sed"] < 2 || len(images) != 2 {
		t.Errorf("the page has few command lines: %v, images %v", ran, images)
	}
	c.checkRemoved()

	manifests, err := filepath.Glob(checkout + "/deploy/*.yaml")
	if err != nil || len(manifests) == 0 {
		t.Fatal(manifests, err)
	}
	for _, path := range manifests {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`image: (\S+?)(:latest)?\n`).FindAllStringSubmatch(string(text), -1) {
			if !images[m[1]] {
				t.Errorf("%s: docs/kubernetes.md does not build %s", path, m[1])
			}
		}
	}
}

// checkBuild checks that a line builds a target that its Containerfile has, and returns the image.
func checkBuild(t *testing.T, line string) string {
	t.Helper()
	m := regexp.MustCompile(`^podman build -f (\S+) --target (\S+) -t (\S+) \.$`).FindStringSubmatch(line)
	if m == nil {
		t.Fatalf("%s: want podman build -f FILE --target TARGET -t IMAGE .", line)
	}
	text, err := os.ReadFile(filepath.Join(checkout, m[1]))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(text, []byte(" AS "+m[2]+"\n")) {
		t.Errorf("%s: %s has no target %s", line, m[1], m[2])
	}
	return m[3]
}

// finishAll reports every pod as succeeded and every DaemonSet as rolled out.
func (c *cluster) finishAll() {
	c.t.Helper()
	pods, err := c.client.CoreV1().Pods("default").List(c.ctx, metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, pod := range pods.Items {
		pod.Status.Phase = v1.PodSucceeded
		patch := fmt.Appendf(nil, `{"status":{"phase":%q}}`, v1.PodSucceeded)
		if _, err := c.client.CoreV1().Pods("default").Patch(c.ctx, pod.Name, "application/merge-patch+json", patch,
			metav1.PatchOptions{}, "status"); err != nil {
			c.t.Fatal(err)
		}
	}
	sets, err := c.client.AppsV1().DaemonSets("kube-system").List(c.ctx, metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, set := range sets.Items {
		patch := fmt.Appendf(
			nil,
			`{"status":{"observedGeneration":%d,"desiredNumberScheduled":1,"updatedNumberScheduled":1,`+
				`"numberAvailable":1,"numberReady":1,"currentNumberScheduled":1,"numberMisscheduled":0}}`,
			set.Generation,
		)
		if _, err := c.client.AppsV1().
			DaemonSets("kube-system").
			Patch(c.ctx, set.Name, "application/merge-patch+json", patch,
				metav1.PatchOptions{}, "status"); err != nil {
			c.t.Fatal(err)
		}
	}
}

// checkRemoved checks that the page's last lines leave nothing of Spillway in the cluster.
func (c *cluster) checkRemoved() {
	c.t.Helper()
	pods, err := c.client.CoreV1().Pods("default").List(c.ctx, metav1.ListOptions{})
	if err != nil || len(pods.Items) > 0 {
		c.t.Errorf("%d pods are left: %v", len(pods.Items), err)
	}
	sets, err := c.client.AppsV1().DaemonSets("kube-system").List(c.ctx, metav1.ListOptions{})
	if err != nil || len(sets.Items) > 0 {
		c.t.Errorf("%d DaemonSets are left: %v", len(sets.Items), err)
	}
	policies, err := c.client.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(c.ctx, metav1.ListOptions{})
	if err != nil || len(policies.Items) > 0 {
		c.t.Errorf("%d policies are left: %v", len(policies.Items), err)
	}
	classes, err := c.client.ResourceV1().DeviceClasses().List(c.ctx, metav1.ListOptions{})
	if err != nil || len(classes.Items) > 0 {
		c.t.Errorf("%d device classes are left: %v", len(classes.Items), err)
	}
}
