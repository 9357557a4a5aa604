package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/cdispec"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/size"
)

// claim is what a claim has of this node. It is kept as the note of the grant's CDI file.
type claim struct {
	UID       types.UID        `json:"uid"`
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	GPUs      map[string]int64 `json:"gpus"`            // bytes, by UUID
	Limit     int64            `json:"limit,omitempty"` // 0: its GPUs are its own
}

const grantPrefix = "claim-"

// grantName is the name of a claim's grant.
func grantName(uid types.UID) string { return grantPrefix + string(uid) }

// same reports whether a claim has the same parts as another.
func (c claim) same(o claim) bool { return c.Limit == o.Limit && maps.Equal(c.GPUs, o.GPUs) }

// load reads what an earlier process prepared.
func (d *Driver) load() error {
	notes, err := cdispec.Grants(d.cfg.CDIDir)
	if err != nil {
		d.cfg.Log.Warn("a claim's file is left out", "error", err)
	}
	for name, note := range notes {
		var c claim
		if err := json.Unmarshal([]byte(note), &c); err != nil || grantName(c.UID) != name {
			d.cfg.Log.Warn("a claim's file is left out: another program wrote its note", "grant", name)
			continue
		}
		d.claims[c.UID] = c
	}
	// A directory without a file is of a claim that was not prepared to the end, or removed half.
	names, err := d.cfg.Store.Names()
	for _, name := range names {
		if _, described := notes[name]; strings.HasPrefix(name, grantPrefix) && !described {
			err = errors.Join(err, d.cfg.Store.Remove(name))
		}
	}
	return err
}

// Holders returns who has which GPU memory, in the order of the grants' names.
func (d *Driver) Holders() []grants.Holder {
	d.mu.Lock()
	defer d.mu.Unlock()
	var holders []grants.Holder
	for _, c := range d.claims {
		if g, ok := d.grant(c); ok { // else a GPU is not there any more
			holders = append(holders, grants.Holder{Grant: g, Namespace: c.Namespace, Claim: c.Name})
		}
	}
	slices.SortFunc(holders, func(a, b grants.Holder) int { return strings.Compare(a.Name, b.Name) })
	return holders
}

// grant returns a claim's grant, if all its GPUs are there.
func (d *Driver) grant(c claim) (grants.Grant, bool) {
	g := grants.Grant{Name: grantName(c.UID), Limit: c.Limit}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		gpu, ok := d.cfg.Inventory.Find(uuid)
		if !ok {
			return g, false
		}
		g.GPUs = append(g.GPUs, gpu)
	}
	return g, len(g.GPUs) > 0
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, c := range claims {
		devices, err := d.prepare(ctx, c)
		if err != nil {
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
	d.mu.Lock()
	err = d.check(c)
	if errors.Is(err, errNoRoom) { // a claim that is gone may have it
		d.mu.Unlock()
		d.sweep(ctx)
		d.mu.Lock()
		err = d.check(c)
	}
	defer d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	g, _ := d.grant(c)
	access, err := d.cfg.Store.Put(g)
	if err != nil {
		return nil, err
	}
	note, err := json.Marshal(c)
	if err == nil {
		err = cdispec.WriteGrant(d.cfg.CDIDir, g.Name, access, string(note))
	}
	if err != nil {
		if _, before := d.claims[c.UID]; !before {
			err = errors.Join(err, d.cfg.Store.Remove(g.Name))
		}
		return nil, err
	}
	d.claims[c.UID] = c
	return devices, nil
}

// read returns what a claim has been allocated of this node. Its error says what the claim should ask
// for in place of that.
func (d *Driver) read(rc *resourceapi.ResourceClaim) (claim, []kubeletplugin.Device, error) {
	c := claim{UID: rc.UID, Namespace: rc.Namespace, Name: rc.Name, GPUs: map[string]int64{}}
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
		bytes, err := d.consumed(g, r)
		if err != nil {
			return c, nil, err
		}
		c.GPUs[g.UUID] += bytes
		devices = append(devices, kubeletplugin.Device{
			Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device, ShareID: r.ShareID,
			CDIDeviceIDs: []string{cdispec.Name(g.UUID), cdispec.GrantName(grantName(rc.UID))},
		})
	}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		g, _ := d.cfg.Inventory.Find(uuid)
		all, err := d.all(g)
		if err != nil {
			return c, nil, err
		}
		if c.GPUs[uuid] >= all {
			continue
		}
		if len(c.GPUs) > 1 {
			return c, nil, fmt.Errorf("the claim has %s of %s, and other GPUs: part of a GPU is given alone (ask for one GPU, for whole "+
				"ones without a capacity, or add the constraint matchAttribute: %s/uuid)", size.Approx(c.GPUs[uuid]), uuid, d.cfg.Driver)
		}
		c.Limit = c.GPUs[uuid]
	}
	return c, devices, nil
}

// all is how much of a GPU may be given.
func (d *Driver) all(g gpus.GPU) (int64, error) {
	n, err := d.cfg.Layout.Count(g)
	return int64(n) * d.cfg.Layout.Unit, err
}

// consumed returns how many bytes a result has of a GPU, whole MiB. Without a capacity it is a device
// that is not shared.
func (d *Driver) consumed(g gpus.GPU, r resourceapi.DeviceRequestAllocationResult) (int64, error) {
	q, ok := r.ConsumedCapacity[memory]
	if !ok {
		q, ok = r.ConsumedCapacity[resourceapi.QualifiedName(d.cfg.Driver)+"/"+memory]
	}
	if !ok {
		return d.all(g)
	}
	bytes := q.Value() &^ (1<<20 - 1)
	if bytes <= 0 {
		return 0, fmt.Errorf("the request %s has %s of %s: ask for %s at least", r.Request, q.String(), g.UUID, size.Format(d.cfg.Layout.Unit))
	}
	return bytes, nil
}

// errNoRoom is that other claims have too much of a GPU.
var errNoRoom = errors.New("too much of a GPU is given away")

// check refuses a claim for which there is no room, or a sick GPU. One that was prepared before, with the
// same parts, may go on: its pods run. d.mu is held.
func (d *Driver) check(c claim) error {
	if before, ok := d.claims[c.UID]; ok && before.same(c) {
		return nil
	}
	for uuid, bytes := range c.GPUs {
		if why := d.cfg.Inventory.Sick(uuid); why != "" {
			return fmt.Errorf("%s is not healthy: %s", uuid, why)
		}
		g, _ := d.cfg.Inventory.Find(uuid)
		all, err := d.all(g)
		if err != nil {
			return err
		}
		given := int64(0)
		for _, o := range d.claims {
			if o.UID != c.UID {
				given += o.GPUs[uuid]
			}
		}
		if given+bytes > all {
			return fmt.Errorf("%w: %s has %s to give, other claims have %s of it, and this one wants %s",
				errNoRoom, uuid, size.Approx(all), size.Approx(given), size.Approx(bytes))
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
	return nil
}

// sweep removes the claims that the API server says are gone, and of which no process is in the ledger.
// Without an answer nothing is removed.
func (d *Driver) sweep(ctx context.Context) {
	d.mu.Lock()
	claims := slices.Collect(maps.Values(d.claims))
	d.mu.Unlock()
	if err := d.sweepOf(ctx, claims); err != nil && ctx.Err() == nil {
		d.say("sweep", fmt.Sprintf("claims that are gone are not removed: %v; trying again", err))
		return
	}
	d.say("sweep", "")
}

func (d *Driver) sweepOf(ctx context.Context, claims []claim) error {
	var gone []claim
	for _, c := range claims {
		rc, err := d.api.ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && rc.UID != c.UID:
			gone = append(gone, c)
		case err != nil:
			return err
		}
	}
	if len(gone) == 0 {
		return nil
	}
	inLedger, err := leases.Holders(d.cfg.Store.Ledger())
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range gone {
		if slices.ContainsFunc(inLedger, func(h leases.Holder) bool { return h.Group == grantName(c.UID) }) {
			continue
		}
		if _, there := d.claims[c.UID]; !there {
			continue // unprepared in the meantime
		}
		d.cfg.Log.Info("a claim is gone, and was not unprepared: removing it", "claim", c.Namespace+"/"+c.Name)
		err = errors.Join(err, d.remove(c.UID))
	}
	return err
}
