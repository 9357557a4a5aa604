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
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/internal/size"
)

// claim is what a ResourceClaim has of this node's GPUs. The driver keeps it as the note of the claim's
// grant, and so finds it again after a restart.
//
// A claim is prepared from the moment when the driver has written its grant and its CDI file, until the
// kubelet unprepares it or a sweep finds that the API server does not have it any more. A prepared
// claim keeps its limit whatever the driver's flags are later: its processes have read the limit. A
// claim is unknown if its grant exists and its note cannot be read: it may have running pods, but the
// driver cannot tell which GPU they use, so it prepares no other claim until the kubelet prepares the
// unknown one again or unprepares it.
type claim struct {
	UID       types.UID        `json:"uid"`
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	Results   []result         `json:"results"`         // as the scheduler allocated them
	GPUs      map[string]int64 `json:"gpus"`            // bytes, by the GPU's UUID
	Limit     int64            `json:"limit,omitempty"` // bytes; 0: the claim has whole GPUs
}

// result is a part of a GPU, or a whole one, that the scheduler allocated for one request of a claim.
type result struct {
	Request string `json:"request"`
	GPU     string `json:"gpu"`             // UUID
	Memory  string `json:"memory"`          // a quantity; empty: the device is not shared
	Share   string `json:"share,omitempty"` // id of the share of the device
}

const grantPrefix = "claim-"

// grantName returns the name of a claim's grant.
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

// holds returns how many bytes of a GPU the claim has. all is what the GPU has to give now; a claim of
// whole GPUs has all of that, even if the GPU had less when the claim was prepared.
func (c claim) holds(uuid string, all int64) int64 {
	bytes, ok := c.GPUs[uuid]
	if ok && c.Limit == 0 {
		return max(all, bytes)
	}
	return bytes
}

// load reads the claims that an earlier process prepared. It removes a grant only if its preparation
// was certainly not completed, because a running container could not get its limits again.
func (d *Driver) load() error {
	names, err := d.cfg.Store.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, grantPrefix) {
			continue
		}
		uid := types.UID(strings.TrimPrefix(name, grantPrefix))
		note, err := d.cfg.Store.Note(name)
		if errors.Is(err, fs.ErrNotExist) {
			if used, e := d.cfg.Store.InUse(name); e != nil {
				err = e
			} else if !used && d.remove(uid) == nil {
				continue // its preparation, or its removal, was not completed
			}
		}
		var c claim
		if err == nil {
			c, err = parse(name, note)
		}
		if err != nil {
			d.unknown[uid] = true
			d.cfg.Log.Warn("it is not known what a claim has: no other claim gets memory until the kubelet prepares "+
				"it again, or ends it", "claim", uid, "error", err)
			continue
		}
		d.claims[uid] = c
		if err := d.keepFiles(c); err != nil {
			d.cfg.Log.Warn("a claim lacks its limits or its CDI file", "claim", c.Namespace+"/"+c.Name, "error", err)
		}
	}
	return nil
}

// Holders returns the prepared claims with their GPUs, in no particular order.
func (d *Driver) Holders() []grants.Holder {
	d.mu.Lock()
	defer d.mu.Unlock()
	var holders []grants.Holder
	for _, c := range d.claims {
		if g, err := d.grant(c); err == nil { // else the node does not have one of its GPUs any more
			holders = append(holders, grants.Holder{Grant: g, Namespace: c.Namespace, Claim: c.Name})
		}
	}
	return holders
}

// grant returns a claim's grant. It fails if the node does not have one of the claim's GPUs any more.
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

// keepFiles writes the grant and then the CDI file of a claim, unless both exist and can be read. It
// does not replace existing files, because the claim's processes have read the ratio and the size there.
func (d *Driver) keepFiles(c claim) error {
	name := grantName(c.UID)
	if d.cfg.Store.Has(name) && cdispec.CheckGrant(d.cfg.CDIDir, name) == nil {
		return nil
	}
	return d.write(c)
}

// write writes the grant, by whose note the claim counts after a restart, and then the CDI file.
func (d *Driver) write(c claim) error {
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

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *Driver) PrepareResourceClaims(
	ctx context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, c := range claims {
		devices, err := d.prepare(ctx, c)
		if err != nil {
			err = errors.New(strings.ReplaceAll(err.Error(), "\n", "; ")) // one line of the pod's events
			d.cfg.Log.Warn("refused", "claim", c.Namespace+"/"+c.Name, "error", err)
		}
		results[c.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

// prepare writes what the containers of a claim need, and returns the claim's devices. If a GPU has no
// room, prepare removes claims of that GPU that the API server does not have any more, and tries again.
func (d *Driver) prepare(ctx context.Context, rc *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	c, devices, err := d.read(rc)
	if err != nil {
		return nil, err
	}
	asking, cancel := context.WithTimeout(ctx, sweepFor)
	defer cancel()
	swept := map[string]bool{}
	for {
		full, err := d.prepareOnce(c)
		if full == "" || swept[full] {
			return devices, err
		}
		swept[full] = true
		d.sweep(asking, full)
	}
}

// prepareOnce prepares a claim if there is room for it. A claim that is prepared already, with the same
// results, stays as it is, even if its GPU is unhealthy now: its pods run. If a GPU has no room, full is
// the GPU's UUID.
func (d *Driver) prepareOnce(c claim) (full string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, again := d.claims[c.UID]
	if again && slices.Equal(before.Results, c.Results) {
		return "", d.keepFiles(before)
	}
	if again {
		used, err := d.cfg.Store.InUse(grantName(c.UID))
		if err != nil {
			return "", err
		}
		if used {
			return "", errors.New("the claim has other devices than before, and processes use those: " +
				"end the pods that had it")
		}
	}
	if err := d.measure(&c); err != nil {
		return "", err
	}
	if full, err := d.check(c); err != nil {
		return full, err
	}
	if err := d.write(c); err != nil {
		mayRun := again || d.unknown[c.UID] // its pods
		if !mayRun && d.remove(c.UID) != nil {
			d.claims[c.UID] = c // what is left counts until it is removed
		}
		return "", err
	}
	d.claims[c.UID] = c
	delete(d.unknown, c.UID)
	return "", nil
}

// read returns what the scheduler allocated to a claim on this node. Its errors name what the claim
// should request instead.
func (d *Driver) read(rc *resourceapi.ResourceClaim) (claim, []kubeletplugin.Device, error) {
	c := claim{UID: rc.UID, Namespace: rc.Namespace, Name: rc.Name}
	if rc.Status.Allocation == nil {
		return c, nil, errors.New("the claim is not allocated: delete its pods, so that it is")
	}
	for _, config := range rc.Status.Allocation.Devices.Config {
		if config.Opaque != nil && config.Opaque.Driver == d.cfg.Driver {
			return c, nil, fmt.Errorf("the claim, or its class, has parameters for %s, which has none: remove them",
				d.cfg.Driver)
		}
	}
	var devices []kubeletplugin.Device
	for _, r := range rc.Status.Allocation.Devices.Results {
		if r.Driver != d.cfg.Driver {
			continue
		}
		g, ok := d.devices[r.Device]
		if r.Pool != d.cfg.Node || !ok {
			return c, nil, fmt.Errorf("the device %s of the pool %s is no GPU of the node %s: delete the claim's "+
				"pods, so that it is allocated anew", r.Device, r.Pool, d.cfg.Node)
		}
		if r.AdminAccess != nil && *r.AdminAccess {
			return c, nil, fmt.Errorf("the request %s has adminAccess, which %s does not give: nothing would hold it "+
				"within the GPU's memory", r.Request, d.cfg.Driver)
		}
		p := result{Request: r.Request, GPU: g.UUID}
		for _, name := range []resourceapi.QualifiedName{memory,
			resourceapi.QualifiedName(d.cfg.Driver) + "/" + memory} {
			if q, ok := r.ConsumedCapacity[name]; ok {
				p.Memory = q.String()
			}
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
		return c, nil, fmt.Errorf("the claim has no device of %s: delete its pods, so that it is allocated anew",
			d.cfg.Driver)
	}
	return c, devices, nil
}

// measure computes a claim's bytes of each GPU, in whole MiB, and its limit.
func (d *Driver) measure(c *claim) error {
	c.GPUs = map[string]int64{}
	for _, p := range c.Results {
		all, err := d.all(p.GPU)
		if err != nil {
			return err
		}
		bytes := all
		if p.Memory != "" {
			q, err := resource.ParseQuantity(p.Memory)
			if err != nil {
				return err
			}
			if bytes = q.Value() &^ (1<<20 - 1); bytes <= 0 {
				return fmt.Errorf("the request %s has %s of %s: ask for %s at least", p.Request, q.String(), p.GPU,
					size.Format(d.cfg.Layout.Unit))
			}
		}
		if bytes > all-c.GPUs[p.GPU] {
			return fmt.Errorf("the claim has %s of %s, which has %s to give: delete the claim and its pods, and ask "+
				"for less", size.Approx(add(bytes, c.GPUs[p.GPU])), p.GPU, size.Approx(all))
		}
		c.GPUs[p.GPU] += bytes
	}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		if all, _ := d.all(uuid); c.GPUs[uuid] >= all {
			continue
		}
		if len(c.GPUs) > 1 {
			return fmt.Errorf("the claim has %s of %s, and other GPUs: part of a GPU is given alone (ask for one "+
				"GPU, for whole ones without a capacity, or add the constraint matchAttribute: %s/uuid)",
				size.Approx(c.GPUs[uuid]), uuid, d.cfg.Driver)
		}
		c.Limit = c.GPUs[uuid]
	}
	return nil
}

// all returns how many bytes of a GPU the driver may give, by the ratio and in whole units.
func (d *Driver) all(uuid string) (int64, error) {
	g, _ := d.cfg.Inventory.Find(uuid)
	n, err := d.cfg.Layout.Count(g)
	return int64(n) * d.cfg.Layout.Unit, err
}

// add returns a + b, or the largest number if the sum is larger. Neither may be negative.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// check refuses a claim if there is no room for it or if one of its GPUs is unhealthy. It adds up the
// claims although the scheduler does so too: after a restore of the cluster's data the two may disagree.
// If there is no room, full is the GPU's UUID. d.mu is held.
func (d *Driver) check(c claim) (full string, err error) {
	if !d.unknown[c.UID] {
		for uid := range d.unknown {
			return "", fmt.Errorf("it is not known what the claim with the UID %s has, and so not what is free: "+
				"restart the kubelet, which prepares it again, or end its pods (if there are none, remove grants/%s "+
				"below --dir, and restart the driver)", uid, grantName(uid))
		}
	}
	for _, uuid := range slices.Sorted(maps.Keys(c.GPUs)) {
		if why := d.cfg.Inventory.Sick(uuid); why != "" {
			return "", fmt.Errorf("%s is not healthy: %s: delete the claim and its pods, so that another GPU is found",
				uuid, why)
		}
		all, err := d.all(uuid)
		if err != nil {
			return "", err
		}
		given := int64(0)
		for _, o := range d.claims {
			if o.UID != c.UID {
				given = add(given, o.holds(uuid, all))
			}
		}
		if wants := c.holds(uuid, all); wants > all-given {
			return uuid, fmt.Errorf("too much of a GPU is given away: %s has %s to give, other claims have %s of it, "+
				"and this one wants %s", uuid, size.Approx(all), size.Approx(given), size.Approx(wants))
		}
	}
	return "", nil
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *Driver) UnprepareResourceClaims(
	_ context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	results := map[types.UID]error{}
	for _, c := range claims {
		results[c.UID] = d.remove(c.UID)
	}
	return results, nil
}

// remove removes the files of a claim, if it has any, and forgets it. d.mu is held.
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

// sweepFor limits how long a sweep asks the API server: the kubelet may wait for its end.
const sweepFor = 20 * time.Second

// sweep removes claims that the API server does not have any more, except those with a process in the
// ledger. If gpu is not empty, it asks only about claims that have part of that GPU. A claim stays if
// the API server does not answer.
func (d *Driver) sweep(ctx context.Context, gpu string) {
	asking, cancel := context.WithTimeout(ctx, sweepFor)
	defer cancel()
	d.mu.Lock()
	claims := slices.SortedFunc(maps.Values(d.claims), func(a, b claim) int { return cmp.Compare(a.UID, b.UID) })
	d.mu.Unlock()
	var failed error
	for _, c := range claims {
		if _, has := c.GPUs[gpu]; !has && gpu != "" {
			continue
		}
		gone, err := d.isGone(asking, c)
		if gone {
			err = d.removeGone(c)
		}
		failed = cmp.Or(failed, err)
	}
	switch {
	case failed == nil:
		d.status.Warn("sweep", "")
	case ctx.Err() == nil:
		d.status.Warn("sweep", fmt.Sprintf("not all claims that are gone are removed: %v; trying again", failed))
	}
}

// isGone reports whether the API server does not have a claim any more, or whether the claim has nothing
// of this node any more. It ignores a 404 that does not name this claim: a proxy, or a server that does
// not serve the API group, answers 404 too.
func (d *Driver) isGone(ctx context.Context, c claim) (bool, error) {
	// d.api tries several versions of the API and returns the last answer, which may be such a 404.
	rc, err := d.cfg.Client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
	var status apierrors.APIStatus
	if apierrors.IsNotFound(err) && errors.As(err, &status) && !apierrors.HasStatusCause(err,
		metav1.CauseTypeUnexpectedServerResponse) {
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

// removeGone removes a claim, unless one of its processes is in the ledger, or the kubelet has
// unprepared it or prepared it with other results since the sweep began.
func (d *Driver) removeGone(c claim) error {
	used, err := d.cfg.Store.InUse(grantName(c.UID))
	if used || err != nil {
		return err
	}
	d.mu.Lock()
	now, there := d.claims[c.UID]
	there = there && slices.Equal(now.Results, c.Results)
	if there {
		err = d.remove(c.UID)
	}
	d.mu.Unlock()
	if there && err == nil {
		d.cfg.Log.Info("a claim is gone, and was not unprepared: it is removed", "claim", c.Namespace+"/"+c.Name)
	}
	return err
}

// removeOthers removes the grants that the device plugin made and that nobody has used for long.
func (d *Driver) removeOthers(now time.Time) {
	removed, err := d.cfg.Store.RemoveUnused(now, func(name string) bool {
		return strings.HasPrefix(name,
			grantPrefix)
	})
	if len(removed) > 0 {
		d.cfg.Log.Info("what the device plugin gave is removed: nobody uses it", "grants", len(removed))
	}
	problem := ""
	if err != nil {
		problem = fmt.Sprintf("what the device plugin gave is not removed: %v; trying again", err)
	}
	d.status.Warn("others", problem)
}
