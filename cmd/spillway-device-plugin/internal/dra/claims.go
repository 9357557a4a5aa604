package dra

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/cdispec"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/size"
)

// claim is what a claim has of this node. It is kept as the note of the claim's grant.
type claim struct {
	UID       types.UID        `json:"uid"`
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	Results   []result         `json:"results"`         // as the scheduler allocated it
	GPUs      map[string]int64 `json:"gpus"`            // bytes, by UUID
	Limit     int64            `json:"limit,omitempty"` // 0: its GPUs are its own
}

// result is a part of a GPU, or all of it, for one request of a claim.
type result struct {
	Request string `json:"request"`
	GPU     string `json:"gpu"`             // its UUID
	Memory  string `json:"memory"`          // a quantity; empty: a device that is not shared
	Share   string `json:"share,omitempty"` // which share of the device it is
}

const grantPrefix = "claim-"

// grantName is the name of a claim's grant.
func grantName(uid types.UID) string { return grantPrefix + string(uid) }

// parse reads the note of a grant.
func parse(name, note string) (claim, error) {
	var c claim
	err := json.Unmarshal([]byte(note), &c)
	ok := err == nil && grantName(c.UID) == name && len(c.GPUs) > 0 && len(c.Results) > 0 && c.Limit >= 0
	for _, bytes := range c.GPUs {
		ok = ok && bytes > 0
	}
	if !ok {
		return c, errors.New("its note is damaged")
	}
	return c, nil
}

// holds returns how much of a GPU a claim has, of all that there is to give.
func (c claim) holds(uuid string, all int64) int64 {
	bytes, ok := c.GPUs[uuid]
	if ok && c.Limit == 0 {
		return max(all, bytes) // whatever that was when it was prepared
	}
	return bytes
}

// load reads what an earlier process prepared. Only what was certainly not prepared to the end is
// removed: a container that runs could not get its limits again.
func (d *Driver) load() error {
	names, err := d.cfg.Store.Names()
	if err != nil {
		return err
	}
	held, ledger := leases.Holders(d.cfg.Store.Ledger())
	if ledger != nil {
		d.cfg.Log.Warn("nothing is removed, as not all of the ledger can be read", "error", ledger)
	}
	for _, name := range names {
		if !strings.HasPrefix(name, grantPrefix) {
			continue
		}
		uid := types.UID(strings.TrimPrefix(name, grantPrefix))
		note, err := d.cfg.Store.Note(name)
		if errors.Is(err, fs.ErrNotExist) && ledger == nil && !inLedger(held, name) {
			err := d.remove(uid) // it was not prepared to the end, or removed half
			if err == nil {
				continue
			}
		}
		var c claim
		if err == nil {
			c, err = parse(name, note)
		}
		if err != nil {
			d.unknown[uid] = true
			d.cfg.Log.Warn("it is not known what a claim has: no other claim gets memory until the kubelet prepares it again, or ends it",
				"claim", uid, "error", err)
			continue
		}
		d.claims[uid] = c
		if err := d.keepFiles(c); err != nil {
			d.cfg.Log.Warn("a claim lacks its limits or its CDI file", "claim", c.Namespace+"/"+c.Name, "error", err)
		}
	}
	return nil
}

func inLedger(held []leases.Holder, name string) bool {
	return slices.ContainsFunc(held, func(h leases.Holder) bool { return h.Group == name })
}

// Holders returns who has which GPU memory, in the order of the grants' names.
func (d *Driver) Holders() []grants.Holder {
	d.mu.Lock()
	defer d.mu.Unlock()
	var holders []grants.Holder
	for _, c := range d.claims {
		if g, err := d.grant(c); err == nil { // else a GPU is not there any more
			holders = append(holders, grants.Holder{Grant: g, Namespace: c.Namespace, Claim: c.Name})
		}
	}
	slices.SortFunc(holders, func(a, b grants.Holder) int { return strings.Compare(a.Name, b.Name) })
	return holders
}

// grant returns a claim's grant, if all its GPUs are there.
func (d *Driver) grant(c claim) (grants.Grant, error) {
	g := grants.Grant{Name: grantName(c.UID), Limit: c.Limit}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		gpu, ok := d.cfg.Inventory.Find(uuid)
		if !ok {
			return g, fmt.Errorf("the GPU %s is not there any more: delete the claim's pods", uuid)
		}
		g.GPUs = append(g.GPUs, gpu)
	}
	note, err := json.Marshal(c)
	g.Note = string(note)
	return g, err
}

// put makes what a claim's containers need: first the grant with its note, by which it counts, and then the
// CDI file.
func (d *Driver) put(c claim) error {
	g, err := d.grant(c)
	if err != nil {
		return err
	}
	access, err := d.cfg.Store.Put(g)
	if err != nil {
		return err
	}
	return cdispec.WriteGrant(d.cfg.CDIDir, g.Name, access)
}

// keepFiles makes again what is gone of a claim that was prepared. What is there stays as it is: its
// processes agree on the ratio and the size that they read there.
func (d *Driver) keepFiles(c claim) error {
	name := grantName(c.UID)
	if d.cfg.Store.Has(name) && cdispec.CheckGrant(d.cfg.CDIDir, name) == nil {
		return nil
	}
	return d.put(c)
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, c := range claims {
		devices, err := d.prepare(ctx, c)
		if err != nil {
			err = errors.New(strings.ReplaceAll(err.Error(), "\n", "; ")) // a line of the pod's events
			d.cfg.Log.Warn("refused", "claim", c.Namespace+"/"+c.Name, "error", err)
		}
		results[c.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

// prepare makes what containers need for a claim, and returns what the runtime calls it.
func (d *Driver) prepare(ctx context.Context, rc *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	c, devices, err := d.read(rc)
	if err != nil {
		return nil, err
	}
	asking, cancel := context.WithTimeout(ctx, sweepFor)
	defer cancel()
	asked := map[string]bool{}
	for err = d.give(c); ; err = d.give(c) {
		var full *fullError
		if !errors.As(err, &full) || asked[full.uuid] {
			break
		}
		asked[full.uuid] = true
		d.sweep(asking, full.uuid) // claims that are gone may have it
	}
	if err != nil {
		return nil, err
	}
	return devices, nil
}

// give makes what containers need for a claim, if there is room for it. One that was prepared before, with
// the same results, stays what it was: its pods run, whatever a unit is now and whether its GPU is well.
func (d *Driver) give(c claim) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, again := d.claims[c.UID]
	if again && slices.Equal(before.Results, c.Results) {
		return d.keepFiles(before)
	}
	if again {
		held, err := leases.Holders(d.cfg.Store.Ledger())
		if err != nil {
			return err
		}
		if inLedger(held, grantName(c.UID)) {
			return errors.New("the claim has other devices than before, and processes use those: end the pods that had it")
		}
	}
	if err := d.measure(&c); err != nil {
		return err
	}
	if err := d.check(c); err != nil {
		return err
	}
	if err := d.put(c); err != nil {
		if again || d.unknown[c.UID] {
			return err // its pods may run
		}
		if left := d.remove(c.UID); left != nil {
			d.claims[c.UID] = c // what is left counts until it is removed
		}
		return err
	}
	d.claims[c.UID] = c
	delete(d.unknown, c.UID)
	return nil
}

// read returns what a claim has been allocated of this node. Its error says what the claim should ask
// for in place of that.
func (d *Driver) read(rc *resourceapi.ResourceClaim) (claim, []kubeletplugin.Device, error) {
	c := claim{UID: rc.UID, Namespace: rc.Namespace, Name: rc.Name}
	if rc.Status.Allocation == nil {
		return c, nil, errors.New("the claim is not allocated: delete its pods, so that it is")
	}
	for _, config := range rc.Status.Allocation.Devices.Config {
		if config.Opaque != nil && config.Opaque.Driver == d.cfg.Driver {
			return c, nil, fmt.Errorf("the claim, or its class, has parameters for %s, which has none: remove them", d.cfg.Driver)
		}
	}
	var devices []kubeletplugin.Device
	for _, r := range rc.Status.Allocation.Devices.Results {
		if r.Driver != d.cfg.Driver {
			continue
		}
		g, ok := d.devices[r.Device]
		if r.Pool != d.cfg.Node || !ok {
			return c, nil, fmt.Errorf("the device %s of the pool %s is no GPU of the node %s: delete the claim's pods, so that it is allocated anew",
				r.Device, r.Pool, d.cfg.Node)
		}
		if r.AdminAccess != nil && *r.AdminAccess {
			return c, nil, fmt.Errorf("the request %s has adminAccess, which %s does not give: nothing would hold it within the GPU's memory", r.Request, d.cfg.Driver)
		}
		p := result{Request: r.Request, GPU: g.UUID}
		if q, ok := d.consumed(r); ok {
			p.Memory = q.String()
		}
		if r.ShareID != nil {
			p.Share = string(*r.ShareID)
		}
		c.Results = append(c.Results, p)
		devices = append(devices, kubeletplugin.Device{
			Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device, ShareID: r.ShareID,
			CDIDeviceIDs: []string{cdispec.Name(g.UUID), cdispec.GrantName(grantName(rc.UID))},
		})
	}
	if len(c.Results) == 0 {
		return c, nil, fmt.Errorf("the claim has no device of %s: delete its pods, so that it is allocated anew", d.cfg.Driver)
	}
	return c, devices, nil
}

// consumed returns how much a result takes of a device. One that is not shared has no such thing.
func (d *Driver) consumed(r resourceapi.DeviceRequestAllocationResult) (resource.Quantity, bool) {
	q, ok := r.ConsumedCapacity[memory]
	if !ok {
		q, ok = r.ConsumedCapacity[resourceapi.QualifiedName(d.cfg.Driver)+"/"+memory]
	}
	return q, ok
}

// measure says what a claim's results come to: bytes of each GPU, whole MiB, and its limit.
func (d *Driver) measure(c *claim) error {
	c.GPUs = map[string]int64{}
	all := map[string]int64{}
	for _, p := range c.Results {
		g, _ := d.cfg.Inventory.Find(p.GPU)
		most, err := d.all(g)
		if err != nil {
			return err
		}
		all[p.GPU] = most
		bytes := most
		if p.Memory != "" {
			q, err := resource.ParseQuantity(p.Memory) // at most the largest number
			if err != nil {
				return err
			}
			if bytes = q.Value() &^ (1<<20 - 1); bytes <= 0 {
				return fmt.Errorf("the request %s has %s of %s: ask for %s at least", p.Request, q.String(), p.GPU, size.Format(d.cfg.Layout.Unit))
			}
		}
		if bytes > most-c.GPUs[p.GPU] {
			return fmt.Errorf("the claim has %s of %s, which has %s to give: delete the claim and its pods, and ask for less",
				size.Approx(add(bytes, c.GPUs[p.GPU])), p.GPU, size.Approx(most))
		}
		c.GPUs[p.GPU] += bytes
	}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		if c.GPUs[uuid] >= all[uuid] {
			continue
		}
		if len(c.GPUs) > 1 {
			return fmt.Errorf("the claim has %s of %s, and other GPUs: part of a GPU is given alone (ask for one GPU, for whole "+
				"ones without a capacity, or add the constraint matchAttribute: %s/uuid)", size.Approx(c.GPUs[uuid]), uuid, d.cfg.Driver)
		}
		c.Limit = c.GPUs[uuid]
	}
	return nil
}

// all is how much of a GPU may be given.
func (d *Driver) all(g gpus.GPU) (int64, error) {
	n, err := d.cfg.Layout.Count(g)
	return int64(n) * d.cfg.Layout.Unit, err
}

// add is a + b, or the largest number where that is too large. Neither is negative.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// fullError is that other claims have too much of a GPU.
type fullError struct {
	uuid              string
	all, given, wants int64
}

func (e *fullError) Error() string {
	return fmt.Sprintf("too much of a GPU is given away: %s has %s to give, other claims have %s of it, and this one wants %s",
		e.uuid, size.Approx(e.all), size.Approx(e.given), size.Approx(e.wants))
}

// check refuses a claim for which there is no room, or a sick GPU. d.mu is held.
func (d *Driver) check(c claim) error {
	for uid := range d.unknown { // a claim of those may be prepared: its pods run
		if d.unknown[c.UID] {
			break
		}
		return fmt.Errorf("it is not known what the claim with the UID %s has, and so not what is free: restart the kubelet, which prepares it "+
			"again, or end its pods (if there are none, remove grants/%s below --dir, and restart the driver)", uid, grantName(uid))
	}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		if why := d.cfg.Inventory.Sick(uuid); why != "" {
			return fmt.Errorf("%s is not healthy: %s: delete the claim and its pods, so that another GPU is found", uuid, why)
		}
		g, _ := d.cfg.Inventory.Find(uuid)
		all, err := d.all(g)
		if err != nil {
			return err
		}
		given := int64(0)
		for _, o := range d.claims {
			if o.UID != c.UID {
				given = add(given, o.holds(uuid, all))
			}
		}
		if wants := c.holds(uuid, all); wants > all-given {
			return &fullError{uuid, all, given, wants}
		}
	}
	return nil
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *Driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	results := map[types.UID]error{}
	for _, c := range claims {
		results[c.UID] = d.remove(c.UID)
	}
	return results, nil
}

// remove takes back what was prepared, if anything was. d.mu is held.
func (d *Driver) remove(uid types.UID) error {
	name := grantName(uid)
	if err := cdispec.RemoveGrant(d.cfg.CDIDir, name); err != nil {
		return err
	}
	if err := d.cfg.Store.Remove(name); err != nil {
		return err
	}
	delete(d.claims, uid)
	delete(d.unknown, uid)
	return nil
}

// sweepFor is how long the API server may take to say which claims are gone. The kubelet waits.
const sweepFor = 20 * time.Second

// sweep removes the claims that are gone according to the API server, and of which no process is in the
// ledger. With a GPU, only those that have part of it are asked about. What is not answered stays.
func (d *Driver) sweep(ctx context.Context, gpu string) {
	asking, cancel := context.WithTimeout(ctx, sweepFor)
	defer cancel()
	d.mu.Lock()
	claims := slices.SortedFunc(maps.Values(d.claims), func(a, b claim) int { return cmp.Compare(a.UID, b.UID) })
	d.mu.Unlock()
	var gone []claim
	var failed error
	for _, c := range claims {
		if _, has := c.GPUs[gpu]; !has && gpu != "" {
			continue
		}
		is, err := d.isGone(asking, c)
		if is {
			gone = append(gone, c)
		}
		failed = cmp.Or(failed, err)
	}
	if err := d.removeGone(gone); err != nil {
		failed = err
	}
	d.say("ledger", d.cfg.Store.Strangers())
	switch {
	case failed == nil:
		d.say("sweep", "")
	case ctx.Err() == nil:
		d.say("sweep", fmt.Sprintf("not all claims that are gone are removed: %v; trying again", failed))
	}
}

// isGone reports whether a claim is gone, or has nothing of this node any more. An answer counts only if it
// is the API server's own, about this claim: a server or a proxy that does not know the kind says 404, too.
func (d *Driver) isGone(ctx context.Context, c claim) (bool, error) {
	// Not the client that tries several versions of the API: it returns the last one's answer.
	rc, err := d.cfg.Client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
	var status apierrors.APIStatus
	if apierrors.IsNotFound(err) && errors.As(err, &status) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		of := status.Status().Details
		if of != nil && of.Group == resourceapi.GroupName && of.Kind == "resourceclaims" && of.Name == c.Name {
			return true, nil
		}
	}
	if err != nil || rc.UID != c.UID {
		return err == nil, err
	}
	return rc.Status.Allocation == nil || !slices.ContainsFunc(rc.Status.Allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return r.Driver == d.cfg.Driver && r.Pool == d.cfg.Node
		}), nil
}

// removeGone removes claims, if none of their processes is in the ledger.
func (d *Driver) removeGone(gone []claim) error {
	if len(gone) == 0 {
		return nil
	}
	held, err := leases.Holders(d.cfg.Store.Ledger())
	if err != nil {
		return err
	}
	for _, c := range gone {
		if inLedger(held, grantName(c.UID)) {
			continue
		}
		removed, e := d.removeIf(c)
		if removed {
			d.cfg.Log.Info("a claim is gone, and was not unprepared: it is removed", "claim", c.Namespace+"/"+c.Name)
		}
		err = cmp.Or(err, e)
	}
	return err
}

// removeOthers removes what the other mode left, once nobody has used it for long.
func (d *Driver) removeOthers(now time.Time) {
	removed, err := d.cfg.Store.RemoveUnused(now, func(name string) bool { return strings.HasPrefix(name, grantPrefix) })
	if len(removed) > 0 {
		d.cfg.Log.Info("what the device plugin gave is removed: nobody uses it", "grants", len(removed))
	}
	if err != nil {
		d.say("others", fmt.Sprintf("what the device plugin gave is not removed: %v; trying again", err))
		return
	}
	d.say("others", "")
}

// removeIf removes a claim if it is as it was when the API server was asked.
func (d *Driver) removeIf(c claim) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now, there := d.claims[c.UID]; !there || !slices.Equal(now.Results, c.Results) {
		return false, nil // unprepared in the meantime, or prepared anew
	}
	err := d.remove(c.UID)
	return err == nil, err
}
