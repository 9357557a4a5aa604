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
// or if no task runs. In the latter case, which is logged if the former does not
// hold, what is reserved is the need or, if that is less, all that the space's limit
// leaves beside those of its inputs that are there. Either way the need is
// reserved, not only compared: it counts as used for everybody from then on. And
// no more tasks run at once than there are threads.
//
// # Who is next
//
// Tasks wait in one queue in the order of arrival. Only the oldest, the head,
// reserves with waiting: it stands in the line of each candidate space, so that the
// monitor hears of its demand and makes room, and it is treated there as any other
// request. While the head cannot start, others that can may pass it, Rules.Bypass
// of them; then only the head is admitted. The count begins anew with each head. So
// a head that is larger than the threshold gets its turn: when nobody may pass any
// more, those that run end, and then no task runs.
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
// A Grant belongs to whom Admit gave it, who must end it once, by Done or Release.
// It holds a thread and a reservation, from which buffers are drawn; those may
// outlive it. An Admitter owns no goroutine but those that wait in a call of Admit,
// and neither the spaces nor the reservations' manager. Close it before that one.
//
// # Locks
//
// The Admitter's mutex and that of Ratios are of rank Reservation, are never held
// together with another of that rank, and nothing but counters of spaces is read
// under them. Strategies, estimators, inputs, tasks and the logger are called with
// no lock held, and who waits is woken with none.
//
//	… → Batch → Registry → [Reservation] → Space → Ledger → …
package admission
