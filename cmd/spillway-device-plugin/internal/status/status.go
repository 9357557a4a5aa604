// Package status keeps, for each of several subjects, what is wrong with it, and logs that once until
// it changes. A subject is any name, such as "kubelet". The same outage, seen every ten seconds, gives
// one line in the log; the next outage gives another one.
package status

import (
	"log/slog"
	"sync"
)

// Status has the problems of all subjects. It is safe for concurrent use, and logs without its lock.
type Status struct {
	log *slog.Logger

	mu       sync.Mutex
	problems map[string]string // by subject; one that is missing or empty is well
}

// New returns a Status that logs warnings to log.
func New(log *slog.Logger) *Status { return &Status{log: log, problems: map[string]string{}} }

// Set replaces the problem of a subject, and returns the one before; empty: it is well. It logs nothing.
func (s *Status) Set(subject, problem string) (before string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before = s.problems[subject]
	s.problems[subject] = problem
	return before
}

// Warn replaces the problem of a subject, as Set does, and logs it if it is another one.
func (s *Status) Warn(subject, problem string) {
	if s.Set(subject, problem) != problem && problem != "" {
		s.log.Warn(problem)
	}
}

// Problem returns the problem of a subject; empty: it is well.
func (s *Status) Problem(subject string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problems[subject]
}
