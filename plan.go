package spillway

import (
	"context"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Plan owns a query's repositories and their order. It is safe for concurrent use. It must be
// closed; closing its engine closes it too.
type Plan struct {
	engine  *Engine
	name    string
	number  uint64
	manager *repository.Manager
	owner   *reservation.Owner
	once    sync.Once // guards left and err, the results of Close
	left    []repository.Leftover
	err     error
}

// Owner returns the owner, with the plan's name, of what the plan's goroutines hold and wait for. A
// goroutine that acquires, drains or reads with Owner().Context(ctx) takes part in deadlock
// detection; SetWorkers must set how many do. A goroutine that works alone should have an owner of
// its own (reservation.NewOwner), because one of several can then be chosen to give way. Calls
// without an owner are refused only after Config.StallTimeout. Long waits are logged.
func (p *Plan) Owner() *reservation.Owner { return p.owner }

// Repository returns the repository of an operator's port, and makes it if it is
// new. Repositories stand in the order in which they are made, from the scans to
// the output, unless Order says otherwise.
func (p *Plan) Repository(operator string, port int) (*repository.Repository, error) {
	return p.manager.Ensure(repository.Key{Operator: operator, Port: port})
}

// Manager returns the plan's repository manager, for fan-out, the order, and Clear.
func (p *Plan) Manager() *repository.Manager { return p.manager }

// Close closes the plan's repositories, drops the batches that are left in them, and returns the
// repositories that had some: a query that was not cancelled has consumed everything. Batches with
// open handles are freed when the last handle closes. Close waits for batches that are being moved
// or taken. It does not wait for a Put, so an event of one may call it. A second call returns the
// same.
func (p *Plan) Close() ([]repository.Leftover, error) {
	p.once.Do(func() {
		p.left, p.err = p.manager.Close(context.Background())
		e := p.engine // which, if it is closed meanwhile, waits for this
		e.recorder.NamePlan(p.number, "")
		e.mu.Lock()
		delete(e.plans, p.name)
		e.mu.Unlock()
	})
	return p.left, p.err
}

// Plan returns a new plan. The name of an open plan is an error.
func (e *Engine) Plan(name string) (*Plan, error) {
	p, err := e.newPlan(name)
	if err == nil {
		e.recorder.NamePlan(p.number, name)
	}
	return p, err
}

func (e *Engine) newPlan(name string) (*Plan, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, fmt.Errorf("spillway: plan %q: %w", name, tier.ErrClosed)
	}
	if _, ok := e.plans[name]; ok {
		return nil, fmt.Errorf("spillway: a plan %q is open already", name)
	}
	e.plan++
	manager := repository.NewManager(name, e.plan, repository.Config{
		Mover: e.mover, IDs: &e.ids, Observer: e.Observer(), Origins: e.cfg.Events != nil, Calls: &e.calls,
		Reservations: e.reservations, Heap: &e.overflow,
	})
	p := &Plan{engine: e, name: name, number: e.plan, owner: reservation.NewOwner(name), manager: manager}
	e.plans[name] = p
	return p, nil
}
