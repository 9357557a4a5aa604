package payload

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

func TestImageReleasesOnce(t *testing.T) {
	for name, body := range map[string]int64{"with a body": 4096, "empty": 0} {
		t.Run(name, func(t *testing.T) {
			host := newSpace(t, "host:0")
			p := NewImage(&Descriptor{Body: body}, draw(t, host, body), host)
			if p.Leased() != 0 || p.Space() != host || p.Type() != PlainImage {
				t.Errorf("%d leases in %s as %s", p.Leased(), p.Space().ID(), p.Type())
			}
			if err := p.Release(); err != nil {
				t.Fatal(err)
			}
			mustBeEmpty(t, host)
			defer func() {
				if p := recover(); (p != nil) != invariants.Enabled {
					t.Errorf("second release: panic %v", p)
				}
			}()
			if err := p.Release(); !errors.Is(err, tier.ErrReleased) {
				t.Errorf("second release: %v", err)
			}
		})
	}
}

func TestNewImagePanicsOnBugs(t *testing.T) {
	host, disk := newSpace(t, "host:0"), newSpace(t, "disk:0")
	buf := draw(t, host, 4096)
	defer func() {
		if err := buf.Release(); err != nil {
			t.Error(err)
		}
	}()
	for name, f := range map[string]func(){
		"no descriptor": func() { NewImage(nil, buf, host) },
		"no space":      func() { NewImage(&Descriptor{}, nil, nil) },
		"no buffer":     func() { NewImage(&Descriptor{Body: 4096}, nil, host) },
		"too short":     func() { NewImage(&Descriptor{Body: 8192}, buf, host) },
		"elsewhere":     func() { NewImage(&Descriptor{Body: 4096}, buf, disk) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

func TestCuts(t *testing.T) {
	const p = tier.Page
	tests := []struct {
		name  string
		body  int64
		spans []Span
		want  []int64
	}{
		{"no body", 0, nil, nil},
		{"one page", p, []Span{{0, 100}}, nil},
		{"one buffer", 4 * p, []Span{{0, 4 * p}}, nil},
		{"two that meet at a page", 4 * p, []Span{{0, 2 * p}, {2 * p, 2 * p}}, []int64{2 * p}},
		{"small ones before and after", 3 * p, []Span{{0, 64}, {p, p}, {2 * p, 64}}, []int64{p, 2 * p}},
		{"one across a page", 3 * p, []Span{{0, 64}, {p - 64, 128}, {2 * p, p}}, []int64{2 * p}},
		{"one that ends at a page", 2 * p, []Span{{0, 64}, {p - 64, 64}, {p, 64}}, []int64{p}},
		{"absent and empty ones", 2 * p, []Span{Absent, {0, p}, Absent, {64, 0}, {p, p}}, []int64{p}},
		{"out of order", 3 * p, []Span{{2 * p, p}, {0, p}, {p, p}}, []int64{p, 2 * p}},
		{"shared by two arrays", 3 * p, []Span{{0, 2 * p}, {0, 2 * p}, {2 * p, p}}, []int64{2 * p}},
		{"one inside another", 4 * p, []Span{{0, 3 * p}, {p, 64}, {3 * p, p}}, []int64{3 * p}},
		{"a gap", 5 * p, []Span{{0, 64}, {4 * p, 64}}, []int64{p, 2 * p, 3 * p, 4 * p}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			d := &Descriptor{Body: test.body, Buffers: test.spans}
			before := slices.Clone(test.spans)
			got := d.Cuts()
			if !slices.Equal(got, test.want) {
				t.Errorf("%d, want %d", got, test.want)
			}
			if !slices.Equal(before, test.spans) {
				t.Error("the descriptor was changed")
			}
			// By the definition, place by place.
			var slow []int64
			for c := int64(p); c < test.body; c += p {
				if !slices.ContainsFunc(test.spans, func(s Span) bool {
					return s.Offset >= 0 && s.Offset < c && c < s.Offset+s.Length
				}) {
					slow = append(slow, c)
				}
			}
			if !slices.Equal(got, slow) {
				t.Errorf("%d, by the definition %d", got, slow)
			}
		})
	}
}

// A million batches have many nodes and spans, which must be small and free of pointers.
func TestSize(t *testing.T) {
	for _, plain := range []reflect.Type{reflect.TypeFor[Node](), reflect.TypeFor[Span]()} {
		for i := range plain.NumField() {
			if plain.Field(i).Type.Kind() != reflect.Int64 {
				t.Errorf("%s.%s is not a plain number", plain, plain.Field(i).Name)
			}
		}
		if plain.Size() != 16 {
			t.Errorf("%s is %d bytes, want 16", plain, plain.Size())
		}
	}
}
