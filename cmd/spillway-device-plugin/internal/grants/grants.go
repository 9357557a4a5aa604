// Package grants keeps what containers may use: one directory for each grant with its limits, and the
// node's ledger, in which the processes of all containers count together.
//
//	ROOT                        only root may enter it (0700): containers get what is below as mounts
//	ROOT/ledger                 the node's ledger, see internal/leases; mounted into all containers
//	ROOT/grants/NAME/limits     the limits of one grant's processes, mounted into its containers
//	ROOT/grants/NAME/note       text that the grant's maker reads after a restart; not mounted
//
// One Store at a time has a ROOT: it locks the directory.
//
// A grant's name is also its group in the ledger, so the ledger finds the grant's processes whatever
// users they run as and however many containers they run in.
//
// The environment of the containers has the same limits. The directory exists for processes without
// that environment, such as a login session.
package grants

import (
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/atomicfile"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
)

// Grant is what a container, or the containers that share a claim, may use.
type Grant struct {
	Name  string     // unique on the node; up to 63 letters, digits and dashes
	GPUs  []gpus.GPU // at least one
	Limit int64      // bytes of GPU memory, whole MiB; 0: all of the GPUs
	Own   bool       // the containers set their own limits; Limit is their default
	Note  string     // see Store.Note; empty: none
}

// Holder is a container of a pod, or a claim that several pods may share, with its grant.
type Holder struct {
	Grant
	Namespace string
	Pod       string // of a container
	Container string // of a container
	Claim     string // of a claim
}

// Mount is a directory of the node that a container gets.
type Mount struct {
	Host      string
	Container string
	ReadOnly  bool
}

// Access is what a container needs for a grant.
type Access struct {
	Env    map[string]string
	Mounts []Mount
}

// Store is the directory with all grants of a node. It is safe for concurrent use, except Close, which
// comes last.
type Store struct {
	root  string
	ratio *big.Rat
	lock  *os.File

	mu     sync.Mutex
	unused map[string]time.Time // by grant: the first RemoveUnused of those in a row that found it unused
}

// Open opens the directory root, which it makes if it does not exist, and shares the ledger for the GPUs.
// It keeps existing grants, and removes what dead processes left in the ledger. The ratio is the
// multiple of a GPU's memory that limits may promise; nil means 1.
//
// Only root can call Open. Because Open changes the directory's mode, it refuses a directory with other
// things in it. It refuses a directory that another Store has, of this process or another. The caller
// closes the Store.
func Open(root string, ratio *big.Rat, list []gpus.GPU) (_ *Store, err error) {
	if !filepath.IsAbs(root) {
		return nil, fmt.Errorf("the directory for the ledger, %q, is not an absolute path", root)
	}
	s := &Store{root: filepath.Clean(root), ratio: ratio}
	if err := os.MkdirAll(s.root, 0o700); err != nil {
		return nil, err
	}
	if s.lock, err = os.Open(s.root); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	// The kernel releases the lock when the process ends, however it ends.
	if err := syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("another one runs with --dir %s: end it (a node has one of the modes)", s.root)
	} else if err != nil {
		return nil, fmt.Errorf("locking %s: %w", s.root, err)
	}
	if info, err := os.Lstat(s.root); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("%s is no directory: name one for the ledger alone by --dir", s.root)
	}
	entries, err := os.ReadDir(s.root)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if path := filepath.Join(s.root, e.Name()); path != s.Ledger() && path != s.grants() {
			return nil, fmt.Errorf("%s has other things in it, such as %s: name a directory for the ledger alone by "+
				"--dir", s.root, e.Name())
		}
	}
	// A container runtime makes a directory that it has to mount, and lets all users enter it.
	if err := os.Chmod(s.root, 0o700); err != nil {
		return nil, err
	}
	// Earlier versions let all users write to the ledger's directory.
	if err := os.Chmod(s.Ledger(), 0o755); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := leases.Share(s.Ledger(), uuids(list)...); err != nil {
		return nil, err
	}
	return s, os.MkdirAll(s.grants(), 0o700)
}

func uuids(list []gpus.GPU) []string {
	uuids := make([]string, len(list))
	for i, g := range list {
		uuids[i] = g.UUID
	}
	return uuids
}

// Close releases the directory for another Store. It removes nothing.
func (s *Store) Close() error { return s.lock.Close() }

// Ledger returns the path of the ledger on the node.
func (s *Store) Ledger() string { return filepath.Join(s.root, "ledger") }

func (s *Store) grants() string         { return filepath.Join(s.root, "grants") }
func (s *Store) dir(name string) string { return filepath.Join(s.grants(), name) }

// Outdated returns a line about GPUs whose processes have another ratio or size than the GPU has now;
// empty: there are none. All processes of a GPU must have the same ones, so new containers could not use
// such a GPU. The error reports what could not be read of the ledger.
func (s *Store) Outdated(list []gpus.GPU) (string, error) {
	held, err := leases.Holders(s.Ledger())
	var first string
	found := map[string]bool{}
	for _, h := range held {
		i := slices.IndexFunc(list, func(g gpus.GPU) bool { return named.SameUUID(g.UUID, h.Device) })
		if i < 0 {
			continue
		}
		physical := list[i].Memory &^ (1<<20 - 1)
		advertised, e := leases.Advertised(physical, s.ratio)
		if e != nil || h.Physical == physical && h.Advertised == advertised {
			continue
		}
		found[list[i].UUID] = true
		if first == "" {
			first = fmt.Sprintf("%s, of which processes may promise %s of %s, now %s of %s", list[i].UUID,
				size.Approx(h.Advertised), size.Approx(h.Physical), size.Approx(advertised), size.Approx(physical))
		}
	}
	if first == "" {
		return "", err
	}
	return fmt.Sprintf("GPUs in use with another --ratio or --reserve: %d, such as %s: new containers cannot use "+
		"them until those "+
		"that run there have ended (drain the node before you change these flags)", len(found), first), err
}

// Put makes a grant's directory, and returns what the grant's containers need. It may be repeated: the
// same grant gives the same access. If it fails, it leaves nothing of a grant that did not exist before.
func (s *Store) Put(g Grant) (_ Access, err error) {
	if err := checkName(g.Name); err != nil {
		return Access{}, err
	}
	if len(g.GPUs) == 0 {
		return Access{}, fmt.Errorf("the grant %s has no GPU", g.Name)
	}
	made := os.Mkdir(s.dir(g.Name), 0o755)
	if made != nil && !errors.Is(made, fs.ErrExist) {
		return Access{}, made
	}
	defer func() {
		if err != nil && made == nil {
			_ = os.RemoveAll(s.dir(g.Name))
		}
	}()
	if g.Note != "" { // before the limits: a grant that containers can mount has its note
		if err := atomicfile.Write(s.note(g.Name), []byte(g.Note), nil); err != nil {
			return Access{}, err
		}
	}
	env := s.environment(g)
	limits := filepath.Join(s.dir(g.Name), "limits")
	if err := os.MkdirAll(limits, 0o755); err != nil {
		return Access{}, err
	}
	if err := os.Chmod(limits, 0o755); err != nil { // independent of the umask
		return Access{}, err
	}
	text, err := leases.FormatLimits(env)
	if err != nil {
		return Access{}, err
	}
	readable := func(draft string) error { return os.Chmod(draft, 0o644) } // by all users of the container
	if err := atomicfile.Write(filepath.Join(limits, leases.LimitsFile), text, readable); err != nil {
		return Access{}, err
	}
	if env["NVIDIA_VISIBLE_DEVICES"] = strings.Join(uuids(g.GPUs), ","); g.GPUs[0].Simulated {
		env["NVIDIA_VISIBLE_DEVICES"] = "void" // NVIDIA's runtime gives no GPU then
	}
	return Access{Env: env, Mounts: []Mount{
		{Host: s.Ledger(), Container: leases.LedgerDir},
		{Host: limits, Container: leases.LimitsDir, ReadOnly: true},
	}}, nil
}

// environment returns the limits of a grant as the variables that the engine reads.
func (s *Store) environment(g Grant) map[string]string {
	env := map[string]string{
		"SPILLWAY_GPU_QUOTA_DIR":   leases.LedgerDir,
		"SPILLWAY_GPU_QUOTA_GROUP": g.Name,
	}
	both := func(name, value string) {
		env["SPILLWAY_"+name] = value
		env["NVSHARE_"+name] = value
	}
	switch limit := strconv.FormatInt(g.Limit>>20, 10) + "Mi"; {
	case g.Own: // this name alone makes it a default: see leases.LookupLimits
		env["NVSHARE_GPU_MEMORY_LIMIT"] = limit
	case g.Limit > 0:
		both("GPU_MEMORY_LIMIT", limit)
	}
	ratio := "1" // always set, so that a ratio in a container's own environment has no effect
	if s.ratio != nil {
		digits, _ := s.ratio.FloatPrec() // exact, because the ratio was a decimal number
		ratio = s.ratio.FloatString(digits)
	}
	both("GPU_MEMORY_OVERSUB_RATIO", ratio)
	// All processes of a GPU must give the same size. With GPUs of several sizes each process reads its own.
	if !slices.ContainsFunc(g.GPUs, func(o gpus.GPU) bool { return o.Memory != g.GPUs[0].Memory }) {
		both("GPU_PHYSICAL_MEMORY_MB", strconv.FormatInt(g.GPUs[0].Memory>>20, 10))
	}
	return env
}

// Has reports whether a grant exists with the limits that its containers mount.
func (s *Store) Has(name string) bool {
	if checkName(name) != nil {
		return false
	}
	info, err := os.Lstat(filepath.Join(s.dir(name), "limits", leases.LimitsFile))
	return err == nil && info.Mode().IsRegular()
}

// Note returns the note of a grant. Without a note the error is fs.ErrNotExist.
func (s *Store) Note(name string) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	text, err := os.ReadFile(s.note(name))
	return string(text), err
}

func (s *Store) note(name string) string { return filepath.Join(s.dir(name), "note") }

// InUse reports whether a process of a grant is in the ledger.
func (s *Store) InUse(name string) (bool, error) {
	held, err := leases.Holders(s.Ledger())
	return inUse(held, name), err
}

func inUse(held []leases.Holder, name string) bool {
	return slices.ContainsFunc(held, func(h leases.Holder) bool { return h.Group == name })
}

// Remove removes a grant's directory, if it exists. Its processes keep the limits that they have read.
func (s *Store) Remove(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	return os.RemoveAll(s.dir(name))
}

// RemoveAfter is how long a grant must be unused until RemoveUnused removes it. It is long, because a
// grant is small, and a running container cannot get its grant's directory again.
const RemoveAfter = time.Hour

// RemoveUnused removes the grants that have been unused for RemoveAfter, and returns their names. A
// grant is unused if wanted does not want it and no process of it is in the ledger. The time counts from
// the first of several calls in a row that find it unused. now is the time of the call.
func (s *Store) RemoveUnused(now time.Time, wanted func(name string) bool) (removed []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names, err := s.Names()
	if err != nil {
		return nil, err
	}
	held, err := leases.Holders(s.Ledger())
	if err != nil {
		return nil, err
	}
	unused := map[string]time.Time{}
	for _, name := range names {
		if wanted(name) || inUse(held, name) {
			continue
		}
		since, ok := s.unused[name]
		if !ok {
			since = now
		}
		if now.Sub(since) > RemoveAfter {
			e := s.Remove(name)
			if e == nil {
				removed = append(removed, name)
				continue
			}
			err = e
		}
		unused[name] = since
	}
	s.unused = unused
	return removed, err
}

// Names returns the names of all grants, in order.
func (s *Store) Names() ([]string, error) {
	entries, err := os.ReadDir(s.grants())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

func checkName(name string) error {
	ok := len(name) > 0 && len(name) <= 63
	for _, r := range name {
		ok = ok && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-')
	}
	if !ok {
		return fmt.Errorf("%.100q is no name for a grant: want up to 63 letters, digits and dashes", name)
	}
	return nil
}
