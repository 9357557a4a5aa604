package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/cdispec"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/deviceplugin"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/dra"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/metrics"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// server serves the kubelet in one of the modes.
type server interface {
	Run(context.Context) error
	Holders() []grants.Holder
	Ready() error
}

// run serves the kubelet until ctx ends.
func (s *settings) run(ctx context.Context, log *slog.Logger) error {
	opts := gpus.Options{Reserve: s.reserve, Physical: s.physical}
	list := gpus.Sim(s.simCount, opts.Cap(s.simMemory))
	var driver *gpus.Driver // nil: the GPUs are simulated
	if s.simCount == 0 {
		var err error
		if driver, err = gpus.Open(gpus.Library(s.nvml), opts); err != nil {
			return err
		}
		defer driver.Close()
		if list, err = driver.List(); err != nil {
			return err
		}
	}
	if len(list) == 0 {
		return errors.New("there is no GPU to give: try --sim 1x16Gi on a node without one")
	}
	for _, g := range list {
		log.Info("found", "gpu", g.UUID, "name", g.Name, "bytes", g.Memory)
	}
	inventory := gpus.NewInventory(list)
	store, err := grants.Open(s.dir, s.ratio, list)
	if err != nil {
		return err
	}
	defer store.Close()
	outdated, err := store.Outdated(list)
	if err != nil {
		log.Warn("not all of the ledger can be read", "error", err)
	}
	if outdated != "" {
		log.Warn(outdated)
	}
	var cdiName func(string) string
	if s.cdi != "" {
		if err := cdispec.Write(s.cdi, s.hostRoot, list); err != nil {
			return err
		}
		cdiName = cdispec.Name
	}
	layout := units.Layout{Unit: s.unit, Ratio: s.ratio}
	var served server
	if s.mode == modeDRA {
		client, err := dra.Connect(s.kubeconfig)
		if err != nil {
			return err
		}
		served, err = dra.New(dra.Config{
			Driver: s.driver, Node: s.node, Kubelet: s.kubelet, CDIDir: s.cdi, Client: client,
			Layout: layout, Inventory: inventory, Store: store, Log: log,
		})
		if err != nil {
			return err
		}
	} else {
		served, err = deviceplugin.New(deviceplugin.Config{
			Dir:      filepath.Join(s.kubelet, "device-plugins"),
			Resource: s.resource, Whole: s.whole, Shared: s.shared, Shares: s.shares,
			Layout: layout, Inventory: inventory, Store: store, Log: log, CDIName: cdiName,
			Pods: podresources.Client{Socket: filepath.Join(s.kubelet, "pod-resources", "kubelet.sock")},
		})
		if err != nil {
			return err
		}
	}
	work, ctx := errgroup.WithContext(ctx)
	if s.metrics != "" {
		l, err := metrics.Listen(s.metrics)
		if err != nil {
			return err
		}
		source := metrics.Source{
			Inventory: inventory, Layout: layout, Holders: served.Holders, Ledger: store.Ledger(), Ready: served.Ready,
		}
		work.Go(func() error { source.Serve(ctx, l, log); return nil })
	}
	if driver != nil {
		work.Go(func() error { return driver.Watch(ctx, inventory, log) })
	}
	work.Go(func() error { return served.Run(ctx) })
	return work.Wait()
}
