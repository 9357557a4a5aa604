// Package admission decides which tasks may start. A task says what it will need;
// it starts when that much memory can be promised to it, so that tasks which run
// together do not find out half-way that they do not fit together.
//
//	Estimate ─ input, output, overhead ─▶ ┌──────────┐ ── Grant ──▶ task ── draws ──▶ Reservation
//	   ▲                                  │ Admitter │
//	   │ twice as much, after             └──────────┘ ◀── Measured ──┘
//	   └ running out of memory               │    ▲
//	                                 reserves│    │ learns
//	                                         ▼    │
//	                          reservation.Manager   Estimator
//
// # The rule
//
// A task's need in a space is the bytes of its inputs that are not there yet, plus
// its output, plus its overhead, as the space charges them. It is admitted if
//
//	need ≤ min(threshold × capacity, limit) − used
//
// or if no task runs. The latter case is logged if the former does not hold. It reserves the need
// or, if that is less, all that the space's limit leaves beside the task's inputs that are there.
// The need is reserved, not only compared: from then on it counts as used for all. No more tasks
// run at once than there are threads.
//
// # Order
//
// Tasks wait in one queue in the order of arrival. Only the oldest, the head, reserves with
// waiting. It is in the line of each candidate space and is served there like any other request. So
// the monitor sees its demand and makes room. While the head cannot start, others that can may pass
// it, Rules.Bypass of them. After that only the head is admitted. The count starts again with each
// head. So a head that is larger than the threshold gets its turn: when no task may pass, the
// running ones end, and then no task runs.
//
// A wait ends with the grant, with its context, by Close, or with the error with
// which the reservation ended: tier.ErrNoSpace when the monitor has found that
// nothing could ever become free.
//
// # Tasks that run out of memory
//
// Run admits and runs a function, and tries it again with a higher estimate when
// that ran out of memory: at most Rules.MaxAttempts times. Before the next try is
// admitted the inputs are restored and all that the grant held is released.
//
// # Ownership
//
// The caller of Admit owns the Grant and must end it once, by Done or Release. It holds a thread
// and a reservation, from which buffers are drawn. The buffers may outlive it. An Admitter owns
// neither the spaces nor the reservations' manager. Its only goroutines are those that wait in a
// call of Admit. Close it before the manager.
//
// # Locks
//
// The Admitter's mutex and that of Ratios are of rank Reservation. They are never held together
// with another of that rank, and only counters of spaces are read under them. Strategies,
// estimators, inputs, tasks and the logger are called with no lock held. Waiters are woken with
// none.
//
//	… → Batch → Registry → [Reservation] → Space → Ledger → …
package admission
