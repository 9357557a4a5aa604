package dra

import (
	"context"
	"errors"
	"math"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/cdispec"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/internal/leases"
)

// again makes a driver that knows what the one before it left. It is not run.
func (n *node) again() *Driver {
	n.t.Helper()
	d, err := New(n.cfg)
	if err != nil {
		n.t.Fatal(err)
	}
	n.driver = d
	return d
}

// gives has a driver prepare a claim, and returns its limit.
func (n *node) gives(c *resourceapi.ResourceClaim) string {
	n.t.Helper()
	devices, err := n.driver.prepare(n.t.Context(), c)
	if err != nil {
		n.t.Fatalf("%s: %v", c.Name, err)
	}
	if len(devices) != len(c.Status.Allocation.Devices.Results) {
		n.t.Errorf("%s: %+v", c.Name, devices)
	}
	return n.limit(c)
}

// limit is what the processes of a claim read.
func (n *node) limit(c *resourceapi.ResourceClaim) string {
	n.t.Helper()
	text, err := os.ReadFile(
		filepath.Join(filepath.Dir(n.cfg.Store.Ledger()), "grants", grantName(c.UID), "limits", "environment"),
	)
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if limit, ok := strings.CutPrefix(line, "SPILLWAY_GPU_MEMORY_LIMIT="); ok {
			return strings.TrimSpace(limit)
		}
	}
	return "none"
}

// refuses has a driver refuse a claim for a reason, in one line.
func (n *node) refuses(c *resourceapi.ResourceClaim, want string) {
	n.t.Helper()
	if _, err := n.driver.prepare(
		n.t.Context(),
		c,
	); err == nil || !strings.Contains(err.Error(), want) ||
		strings.Contains(err.Error(), "\n") {
		n.t.Errorf("%s: %v; want %q", c.Name, err, want)
	}
}

func (n *node) joins(c *resourceapi.ResourceClaim, device string) *leases.Lease {
	n.t.Helper()
	l, err := leases.Join(
		leases.Terms{
			Dir:      n.cfg.Store.Ledger(),
			Device:   device,
			Group:    grantName(c.UID),
			Physical: 1 << 30,
			Quota:    256 << 20,
		},
	)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { l.Close() })
	return l
}

// Other flags, or another driver that says that a GPU has less memory, change nothing for a claim that was
// prepared: its pods run.
func TestFlagsChange(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	a, whole := n.claim("a", part{"sim-0", 512}), n.claim("whole", part{"sim-1", 1024})
	if first, second := n.gives(a), n.gives(whole); first != "512Mi" || second != "none" {
		t.Fatal(first, second)
	}
	check := func(name string) {
		t.Helper()
		if n.again(); n.gives(a) != "512Mi" || n.gives(whole) != "none" {
			t.Errorf("%s: the limits are %s and %s", name, n.limit(a), n.limit(whole))
		}
	}
	n.cfg.Layout.Unit = 512 << 20
	check("a larger unit")
	n.cfg.Layout.Unit = 768 << 20 // a GPU has only one, of less than before
	check("a unit that does not divide it")
	n.refuses(n.claim("b", part{"sim-0", 512}), "sim-0 has 768.0 MiB to give, other claims have 512.0 MiB of it")
	n.cfg.Layout.Unit, n.cfg.Layout.Ratio = unit, big.NewRat(1, 2)
	check("half the ratio") // a would have the whole GPU now
	n.cfg.Layout.Ratio = big.NewRat(3, 2)
	check("a larger ratio") // whole would be a part
	n.refuses(n.claim("c", part{"sim-1", 512}), "sim-1 has 1.5 GiB to give, other claims have 1.5 GiB of it")
	if given := n.gives(n.claim("d", part{"sim-0", 1024})); given != "1024Mi" {
		t.Error(given)
	}
	n.cfg.Layout.Ratio, n.cfg.Inventory = nil, gpus.NewInventory(gpus.Sim(2, 600<<20))
	check("less memory")
	file, err := os.ReadFile(
		filepath.Join(filepath.Dir(n.cfg.Store.Ledger()), "grants", "claim-0000-a", "limits", "environment"),
	)
	if err != nil || !strings.Contains(string(file), "SPILLWAY_GPU_PHYSICAL_MEMORY_MB=1024\n") {
		t.Errorf("its processes do not agree any more: %s, %v", file, err)
	}
}

// A claim that was allocated anew, and not unprepared before, is judged anew; not while processes of it
// run, as they have another limit.
func TestAllocatedAnew(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	a := n.claim("a", part{"sim-0", 256})
	n.gives(a)
	l := n.joins(a, "sim-0")
	n.delete(a)
	a = n.claim("a", part{"sim-1", 1024})
	n.refuses(a, "processes use those: end the pods that had it")
	for _, page := range []string{"lease-1-x", "lease-1-y"} { // two causes are one line, too
		f, err := os.Create(filepath.Join(n.cfg.Store.Ledger(), "sim-0", page))
		if err == nil {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(f.Name())
		defer f.Close()
	}
	results, err := n.driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{a})
	if text := results[a.UID].Err; err != nil || text == nil || strings.Contains(text.Error(), "\n") ||
		!strings.Contains(text.Error(), "lease-1-y") {
		t.Errorf("%v, %v", text, err)
	}
	for _, page := range []string{"lease-1-x", "lease-1-y"} {
		os.Remove(filepath.Join(n.cfg.Store.Ledger(), "sim-0", page))
	}
	if limit := n.limit(a); limit != "256Mi" {
		t.Errorf("its processes have the limit %s", limit)
	}
	l.Close()
	if limit := n.gives(a); limit != "none" {
		t.Error(limit)
	}
	n.gives(n.claim("b", part{"sim-0", 1024}))
	n.refuses(n.claim("c", part{"sim-1", 256}), "too much of a GPU")
}

// What no GPU has is refused, however large it is, also as a sum.
func TestTooLarge(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	for name, sizes := range map[string][]string{
		"one":       {"2Gi"},
		"sum":       {"768Mi", "512Mi"},
		"largest":   {resource.NewQuantity(math.MaxInt64, resource.BinarySI).String()},
		"larger":    {"100Ei"},
		"wraps":     {"4Ei", "4Ei"},
		"wraps-up":  {"4Ei", "4Ei", "4Ei", "4Ei", "256Mi"},
		"after-one": {"256Mi", "100Ei"},
		"negative":  {"-256Mi"},
	} {
		c := n.claim(name, make([]part, len(sizes))...)
		for i := range c.Status.Allocation.Devices.Results {
			r := &c.Status.Allocation.Devices.Results[i]
			r.Device = "sim-0"
			r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{memory: resource.MustParse(sizes[i])}
		}
		want := "of sim-0, which has 1.0 GiB to give: delete the claim and its pods, and ask for less"
		if name == "negative" {
			want = "ask for 256MiB at least"
		}
		n.refuses(c, want)
	}
	if left := n.kept(); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// A claim that has nothing of this driver is refused, and so is one that is not allocated.
func TestNothing(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	other := n.claim("other", part{"sim-0", 256})
	other.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
	n.refuses(other, "the claim has no device of "+driverName)
	none := n.claim("none")
	n.refuses(none, "the claim has no device of "+driverName)
	none.Status.Allocation = nil
	n.refuses(none, "the claim is not allocated")
}

// A CDI file that is torn or gone, or a directory of them that is another one now, is made again, and the
// claims count as before.
func TestFilesAreMadeAgain(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	a, b := n.claim("a", part{"sim-0", 768}), n.claim("b", part{"sim-1", 512})
	n.gives(a)
	n.gives(b)
	files, err := filepath.Glob(filepath.Join(n.cfg.CDIDir, "*grant_*"))
	if err != nil || len(files) != 2 {
		t.Fatal(files, err)
	}
	if err := errors.Join(os.Truncate(files[0], 7), os.Remove(files[1])); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		n.again()
		if names := n.kept(); !slices.Equal(names, []string{"claim-0000-a", "claim-0000-b"}) || n.limit(a) != "768Mi" ||
			n.limit(b) != "512Mi" {
			t.Errorf("%v, %s, %s", names, n.limit(a), n.limit(b))
		}
		if holders := n.driver.Holders(); len(holders) != 2 {
			t.Errorf("%+v", holders)
		}
	}
	check()
	if err := os.RemoveAll(
		filepath.Join(filepath.Dir(n.cfg.Store.Ledger()), "grants", "claim-0000-a", "limits"),
	); err != nil {
		t.Fatal(err)
	}
	check()
	n.cfg.CDIDir = filepath.Join(t.TempDir(), "other")
	if err := cdispec.Write(n.cfg.CDIDir, "/nonexistent", n.cfg.Inventory.GPUs()); err != nil {
		t.Fatal(err)
	}
	check()
	n.cfg.CDIDir = files[0] // a file: none can be written or read
	n.again()
	if n.limit(a) != "768Mi" || len(n.driver.Holders()) != 2 ||
		!strings.Contains(n.log.String(), "a claim lacks its limits or its CDI file") {
		t.Errorf("%s, %+v: %s", n.limit(a), n.driver.Holders(), n.log)
	}
}

// A claim whose note cannot be read keeps its limits, and nothing else is given until it is prepared again
// or ended. So does one without a note, while a process of it is in the ledger.
func TestUnknown(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	a, b, c := n.claim("a", part{"sim-0", 768}), n.claim("b", part{"sim-1", 256}), n.claim("c", part{"sim-0", 512})
	n.gives(a)
	n.gives(b)
	notes := filepath.Join(filepath.Dir(n.cfg.Store.Ledger()), "grants", "claim-0000-")
	for name, text := range map[string]string{"torn": `{"uid":`, "another's": `{"uid":"0000-b"}`, "negative": `{"uid":"0000-a","results":[{}],"gpus":{"sim-0":-1}}`} {
		if err := os.WriteFile(notes+"a/note", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n.again()
		n.refuses(
			c,
			"it is not known what the claim with the UID 0000-a has, and so not what is free: restart the kubelet",
		)
		if n.limit(a) != "768Mi" {
			t.Errorf("%s: its limit is %s", name, n.limit(a))
		}
	}
	l := n.joins(b, "sim-1")
	if err := os.Remove(notes + "b/note"); err != nil {
		t.Fatal(err)
	}
	n.again()
	n.gives(a)
	n.refuses(c, "the UID 0000-b")
	if limit := n.gives(b); limit != "256Mi" {
		t.Error(limit)
	}
	n.refuses(c, "too much of a GPU")
	l.Close()
	if err := os.Remove(notes + "b/note"); err != nil {
		t.Fatal(err)
	}
	n.again()
	if names := n.kept(); !slices.Equal(names, []string{"claim-0000-a"}) {
		t.Errorf("%v", names)
	}
	if _, err := n.cfg.Store.Put(grants.Grant{Name: "claim-0000-b", GPUs: gpus.Sim(1, 1<<30), Note: "{"}); err != nil {
		t.Fatal(err)
	}
	n.again()
	for range 2 {
		if err := n.driver.remove(b.UID); err != nil {
			t.Error(err)
		}
	}
	n.gives(b)
}

// A claim is gone only if the API server says so of this claim.
func TestGone(t *testing.T) {
	claims := metav1.StatusDetails{Group: "resource.k8s.io", Kind: "resourceclaims", Name: "a"}
	notFound := func(change func(*metav1.StatusDetails)) error {
		details := claims
		change(&details)
		return &apierrors.StatusError{
			ErrStatus: metav1.Status{
				Status:  metav1.StatusFailure,
				Code:    404,
				Reason:  metav1.StatusReasonNotFound,
				Details: &details,
			},
		}
	}
	another := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "0000-x"}}
	var ours *resourceapi.ResourceClaim
	for name, c := range map[string]struct {
		answer func() (*resourceapi.ResourceClaim, error)
		gone   bool
	}{
		"not found": {func() (*resourceapi.ResourceClaim, error) {
			return nil, notFound(func(*metav1.StatusDetails) {})
		}, true},
		"another of its name": {func() (*resourceapi.ResourceClaim, error) { return another, nil }, true},
		"not allocated": {func() (*resourceapi.ResourceClaim, error) {
			c := ours.DeepCopy()
			c.Status.Allocation = nil
			return c, nil
		}, true},
		"of another driver": {func() (*resourceapi.ResourceClaim, error) {
			c := ours.DeepCopy()
			c.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
			return c, nil
		}, true},
		"on another node": {func() (*resourceapi.ResourceClaim, error) {
			c := ours.DeepCopy()
			c.Status.Allocation.Devices.Results[0].Pool = "node-2"
			return c, nil
		}, true},
		"there": {func() (*resourceapi.ResourceClaim, error) { return ours, nil }, false},
		"the API is not served": {func() (*resourceapi.ResourceClaim, error) { // what client-go makes of a page that says 404
			return nil, apierrors.NewGenericServerResponse(404, "get", resourceapi.Resource("resourceclaims"), "a", "404 page not found", 0, true)
		}, false},
		"a proxy": {func() (*resourceapi.ResourceClaim, error) {
			return nil, &apierrors.StatusError{ErrStatus: metav1.Status{Code: 404}}
		}, false},
		"another kind": {func() (*resourceapi.ResourceClaim, error) {
			return nil, notFound(func(d *metav1.StatusDetails) { d.Kind = "namespaces" })
		}, false},
		"another name": {func() (*resourceapi.ResourceClaim, error) {
			return nil, notFound(func(d *metav1.StatusDetails) { d.Name = "b" })
		}, false},
		"no answer": {func() (*resourceapi.ResourceClaim, error) { return nil, errors.New("no answer") }, false},
	} {
		n := newNode(t, apiServer(false))
		n.again()
		ours = n.claim("a", part{"sim-0", 256})
		n.gives(ours)
		n.client.PrependReactor("get", "resourceclaims", func(k8stesting.Action) (bool, runtime.Object, error) {
			rc, err := c.answer()
			return true, rc, err
		})
		n.driver.sweep(t.Context(), "")
		if left := len(n.kept()); left == 0 != c.gone {
			t.Errorf("%s: %d claims are left", name, left)
		}
	}
}

// A sweep asks about all claims, whatever it is told about one, or only about those of a GPU. It ends.
func TestSweep(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	var all []*resourceapi.ResourceClaim
	for _, name := range []string{"a", "b", "c"} {
		c := n.claim(name, part{"sim-0", 256})
		n.gives(c)
		all = append(all, c)
	}
	n.gives(n.claim("d", part{"sim-1", 512}))
	n.delete(all[0])
	n.delete(all[2])
	var asked []string
	n.client.PrependReactor("get", "resourceclaims", func(a k8stesting.Action) (bool, runtime.Object, error) {
		name := a.(k8stesting.GetAction).GetName()
		asked = append(asked, name)
		if name == "b" {
			return true, nil, errors.New("etcd has no leader")
		}
		return false, nil, nil
	})
	e := n.claim("e", part{"sim-0", 512})
	n.gives(e)
	if !slices.Equal(asked, []string{"a", "b", "c"}) {
		t.Errorf("asked about %v", asked)
	}
	if names := n.kept(); !slices.Equal(names, []string{"claim-0000-b", "claim-0000-d", "claim-0000-e"}) {
		t.Errorf("%v", names)
	}
	if log := n.log.String(); !strings.Contains(log, "etcd has no leader") {
		t.Error(n.log)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	n.driver.sweep(ended, "")
	if names := n.kept(); len(names) != 3 {
		t.Errorf("%v", names)
	}
	asked = nil
	n.gives(n.claim("f", part{"sim-1", 256})) // there is room: nobody is asked
	n.driver.sweep(t.Context(), "")
	if len(asked) != 4 {
		t.Errorf("asked about %v", asked)
	}
}

// A claim of several GPUs gets the room of claims that are gone on each of them.
func TestRoomOnSeveral(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	for name, device := range map[string]string{"a": "sim-0", "b": "sim-1"} {
		c := n.claim(name, part{device, 1024})
		n.gives(c)
		n.delete(c)
	}
	if limit := n.gives(n.claim("both", part{"sim-0", 1024}, part{"sim-1", 1024})); limit != "none" {
		t.Error(limit)
	}
}

// What a device plugin left on the node is removed when nobody has used it for long; claims are not.
func TestOtherMode(t *testing.T) {
	n := newNode(t, apiServer(false))
	for _, name := range []string{"units-1", "gpus-2"} {
		if _, err := n.cfg.Store.Put(grants.Grant{Name: name, GPUs: gpus.Sim(1, 1<<30)}); err != nil {
			t.Fatal(err)
		}
	}
	l, err := leases.Join(leases.Terms{Dir: n.cfg.Store.Ledger(), Device: "sim-0", Group: "units-1", Physical: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n.again()
	n.gives(n.claim("a", part{"sim-0", 256}))
	now := time.Now()
	for _, c := range []struct {
		after time.Duration
		left  []string
	}{
		{0, []string{"claim-0000-a", "gpus-2", "units-1"}},
		{grants.RemoveAfter, []string{"claim-0000-a", "gpus-2", "units-1"}},
		{time.Second, []string{"claim-0000-a", "units-1"}},
		{100 * time.Hour, []string{"claim-0000-a", "units-1"}},
	} {
		now = now.Add(c.after)
		n.driver.removeOthers(now)
		if names, err := n.cfg.Store.Names(); err != nil || !slices.Equal(names, c.left) {
			t.Errorf("%v after: %v, %v", c.after, names, err)
		}
	}
	if got := strings.Count(n.log.String(), "what the device plugin gave is removed"); got != 1 {
		t.Errorf("%d lines say so", got)
	}
}
