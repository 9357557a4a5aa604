// Package grants keeps what containers may use: for each of them a directory with their limits, and
// the node's ledger, in which the processes of all containers count together.
//
//	ROOT                        root's alone (0700): who reaches what is below got it as a mount
//	ROOT/ledger                 the node's ledger, see internal/leases; mounted into all
//	ROOT/grants/NAME/limits     what one grant's processes obey, mounted into its containers
//	ROOT/grants/NAME/note       what its maker wants to know again; containers do not see it
//
// One Store at a time has a ROOT: it holds a lock on the directory.
//
// A grant's name is also its group in the ledger. So what its processes hold is found by that name,
// whatever users they have and in however many containers they run.
//
// The same limits are in the environment of the containers. The directory holds for those processes
// that do not have it, such as a login session.
package grants

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/nodelimits"
	"github.com/spillway-db/spillway/internal/size"
)

// Grant is what a container, or those that share a claim, may use.
type Grant struct {
	Name  string     // of at most 63 letters, digits and dashes; no other grant of the node has it
	GPUs  []gpus.GPU // at least one
	Limit int64      // bytes of GPU memory, whole MiB; 0: all of the GPUs
	Own   bool       // containers set their own limits; Limit is for those that set none
	Note  string     // kept beside the grant, for Store.Note; empty: none
}

// Holder is who has a grant: a container of a pod, or a claim, whose pods may be several.
type Holder struct {
	Grant
	Namespace string
	Pod       string
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

// Store is the directory with all grants of a node. Its methods may be called at the same time, except
// Close, which comes last.
type Store struct {
	root  string
	ratio *big.Rat
	lock  *os.File

	mu     sync.Mutex
	unused map[string]time.Time // since when a grant is not wanted
}

// Open makes the directory, and shares the ledger for the GPUs. What is there stays. What dead
// processes left in the ledger is removed. The ratio is how much of a GPU's memory may be promised;
// nil means 1. It must be called as root. A directory that has anything else in it is refused, as its
// mode is changed. So is one that another Store has, of this process or another. The caller closes it.
func Open(root string, ratio *big.Rat, list []gpus.GPU) (_ *Store, err error) {
	if !filepath.IsAbs(root) {
		return nil, fmt.Errorf("the directory for the ledger, %q, is not an absolute path", root)
	}
	s := &Store{root: filepath.Clean(root), ratio: ratio}
	if err := os.MkdirAll(s.root, 0o700); err != nil {
		return nil, err
	}
	if err := s.takeAlone(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := s.checkOwn(); err != nil {
		return nil, err
	}
	// A container runtime makes what it has to mount and does not find, and lets others enter it.
	if err := os.Chmod(s.root, 0o700); err != nil {
		return nil, err
	}
	uuids := make([]string, len(list))
	for i, g := range list {
		uuids[i] = g.UUID
	}
	if err := leases.Share(s.Ledger(), uuids...); err != nil {
		return nil, err
	}
	return s, os.MkdirAll(s.grants(), 0o700)
}

// takeAlone locks the directory. The kernel releases the lock when the process ends, however it ends.
func (s *Store) takeAlone() (err error) {
	if s.lock, err = os.Open(s.root); err != nil {
		return err
	}
	if err = syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		return nil
	}
	s.lock.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("another one runs with --dir %s: end it (a node has one of the modes)", s.root)
	}
	return fmt.Errorf("locking %s: %w", s.root, err)
}

// Close lets another Store have the directory. What is in it stays.
func (s *Store) Close() error { return s.lock.Close() }

// checkOwn refuses a directory that is used for something else.
func (s *Store) checkOwn() error {
	info, err := os.Lstat(s.root)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is no directory: name one for the ledger alone by --dir", s.root)
	}
	entries, err := os.ReadDir(s.root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if path := filepath.Join(s.root, e.Name()); path != s.Ledger() && path != s.grants() {
			return fmt.Errorf("%s has other things in it, such as %s: name a directory for the ledger alone by --dir", s.root, e.Name())
		}
	}
	return nil
}

// Ledger is where the ledger is on the node.
func (s *Store) Ledger() string { return filepath.Join(s.root, "ledger") }

// Outdated says in a line what of the GPUs is in use with another ratio or size than it has now; empty:
// nothing. All processes of a GPU must say the same, so new containers could not use it.
func (s *Store) Outdated(list []gpus.GPU) (string, error) {
	held, err := leases.Holders(s.Ledger())
	var first string
	found := map[string]bool{}
	for _, h := range held {
		i := slices.IndexFunc(list, func(g gpus.GPU) bool { return gpuid.SameUUID(g.UUID, h.Device) })
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
	if len(found) == 0 {
		return "", err
	}
	return fmt.Sprintf("GPUs in use with another --ratio or --reserve: %d, such as %s: new containers cannot use them until those "+
		"that run there have ended (drain the node before you change these flags)", len(found), first), err
}

// Strangers says in a line what containers have put into the ledger that is no part of it; empty: nothing.
func (s *Store) Strangers() string {
	names, err := leases.Strangers(s.Ledger())
	if err != nil || len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("containers have made %d directories in %s, such as %.60q: they do not count, and are removed at the next start",
		len(names), s.Ledger(), names[0])
}

func (s *Store) grants() string         { return filepath.Join(s.root, "grants") }
func (s *Store) dir(name string) string { return filepath.Join(s.grants(), name) }

// Put makes a grant's directory, and returns what its containers need. It may be repeated: the
// same grant gives the same access. If it fails, nothing is left of a grant that was not there before.
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
	if g.Note != "" { // first: a grant that is mounted has it
		if err := writeFile(filepath.Join(s.dir(g.Name), noteFile), g.Note); err != nil {
			return Access{}, err
		}
	}
	env := s.environment(g)
	limits := filepath.Join(s.dir(g.Name), "limits")
	if err := os.MkdirAll(limits, 0o755); err != nil {
		return Access{}, err
	}
	if err := os.Chmod(limits, 0o755); err != nil { // whatever the umask is
		return Access{}, err
	}
	if err := nodelimits.Write(limits, env); err != nil {
		return Access{}, err
	}
	uuids := make([]string, len(g.GPUs))
	for i, gpu := range g.GPUs {
		uuids[i] = gpu.UUID
	}
	if env["NVIDIA_VISIBLE_DEVICES"] = strings.Join(uuids, ","); g.GPUs[0].Simulated {
		env["NVIDIA_VISIBLE_DEVICES"] = "void" // for NVIDIA's runtime: none of its GPUs
	}
	return Access{Env: env, Mounts: []Mount{
		{Host: s.Ledger(), Container: nodelimits.Ledger},
		{Host: limits, Container: nodelimits.Dir, ReadOnly: true},
	}}, nil
}

const noteFile = "note"

// writeFile puts text into a file, in place of what was there. After a crash it has one or the other.
func writeFile(path, text string) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if err = cmp.Or(err, f.Sync()); err != nil {
		f.Close()
	} else if err = f.Close(); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// Has reports whether a grant is there with the limits that its containers mount.
func (s *Store) Has(name string) bool {
	if checkName(name) != nil {
		return false
	}
	info, err := os.Lstat(filepath.Join(s.dir(name), "limits", nodelimits.File))
	return err == nil && info.Mode().IsRegular()
}

// Note returns the note of a grant. Without one the error is fs.ErrNotExist.
func (s *Store) Note(name string) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(s.dir(name), noteFile))
	return string(text), err
}

// mebibytes writes a size in the form that the engine reads.
func mebibytes(bytes int64) string { return strconv.FormatInt(bytes>>20, 10) + "Mi" }

// environment returns the limits of a grant, by the variables that the engine reads.
func (s *Store) environment(g Grant) map[string]string {
	env := map[string]string{
		"SPILLWAY_GPU_QUOTA_DIR":   nodelimits.Ledger,
		"SPILLWAY_GPU_QUOTA_GROUP": g.Name,
	}
	both := func(name, value string) {
		env["SPILLWAY_"+name] = value
		env["NVSHARE_"+name] = value
	}
	switch limit := mebibytes(g.Limit); {
	case g.Own: // the name of a default: see nodelimits.Lookup
		env["NVSHARE_GPU_MEMORY_LIMIT"] = limit
	case g.Limit > 0:
		both("GPU_MEMORY_LIMIT", limit)
	}
	ratio := "1" // always set: a ratio in a container's own environment must not count
	if s.ratio != nil {
		digits, _ := s.ratio.FloatPrec() // it was read from a decimal number, so these are all digits
		ratio = s.ratio.FloatString(digits)
	}
	both("GPU_MEMORY_OVERSUB_RATIO", ratio)
	// All processes of a GPU must give the same size. Of GPUs that differ it is left to each.
	same := func(o gpus.GPU) bool { return o.Memory == g.GPUs[0].Memory }
	if !slices.ContainsFunc(g.GPUs, func(o gpus.GPU) bool { return !same(o) }) {
		both("GPU_PHYSICAL_MEMORY_MB", strconv.FormatInt(g.GPUs[0].Memory>>20, 10))
	}
	return env
}

// Remove removes a grant's directory. Processes that still use it keep what they have read. A grant
// that is not there is no error.
func (s *Store) Remove(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	return os.RemoveAll(s.dir(name))
}

// RemoveAfter is how long a grant must not have been wanted until RemoveUnused removes it. It is small, and
// a container that runs cannot get its own again.
const RemoveAfter = time.Hour

// RemoveUnused removes the grants that have not been wanted for long, and returns their names. One that
// has a process in the ledger stays. It is to be called again and again: it counts from the first call.
func (s *Store) RemoveUnused(now time.Time, wanted func(name string) bool) (removed []string, err error) {
	names, err := s.Names()
	if err != nil {
		return nil, err
	}
	held, err := leases.Holders(s.Ledger())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	before, unused := s.unused, map[string]time.Time{}
	var old []string
	for _, name := range names {
		if wanted(name) || slices.ContainsFunc(held, func(h leases.Holder) bool { return h.Group == name }) {
			continue
		}
		since, ok := before[name]
		if !ok {
			since = now
		}
		unused[name] = since
		if now.Sub(since) > RemoveAfter {
			old = append(old, name)
		}
	}
	s.unused = unused
	s.mu.Unlock()
	for _, name := range old {
		if e := s.Remove(name); e != nil {
			err = e
			continue
		}
		removed = append(removed, name)
	}
	return removed, err
}

// Names returns the names of all grants, in order.
func (s *Store) Names() ([]string, error) {
	entries, err := os.ReadDir(s.grants())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	names := map[string]bool{}
	for _, e := range entries {
		names[e.Name()] = true
	}
	return slices.Sorted(maps.Keys(names)), err
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
