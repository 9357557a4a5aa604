package main

import (
	"context"
	"log/slog"
)

func (s *settings) run(ctx context.Context, log *slog.Logger) error { return nil }
