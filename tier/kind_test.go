package tier_test

import (
	"encoding/json"
	"maps"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

func TestKind(t *testing.T) {
	want := []string{"gpu", "host", "disk"}
	for i, k := range tier.Kinds() {
		if k.String() != want[i] || !k.Valid() {
			t.Errorf("kind %d is %q, valid %v; want %q", i, k, k.Valid(), want[i])
		}
		if got, err := tier.ParseKind(want[i]); got != k || err != nil {
			t.Errorf("ParseKind(%q) = %v, %v; want %v", want[i], got, err, k)
		}
	}
	if !(tier.GPU < tier.Host && tier.Host < tier.Disk) {
		t.Error("the order of the kinds is not that of speed")
	}
	for _, k := range []tier.Kind{0, tier.Disk + 1, 255} {
		if k.Valid() || k.String() != "invalid" {
			t.Errorf("kind %d is %q, valid %v", uint8(k), k, k.Valid())
		}
	}
	for _, s := range []string{"", "invalid", "GPU", "gpu ", "gpu:0", "hosts"} {
		if k, err := tier.ParseKind(s); err == nil {
			t.Errorf("ParseKind(%q) = %v", s, k)
		}
	}
}

func TestID(t *testing.T) {
	for _, c := range []struct {
		text string
		id   tier.ID
	}{
		{"gpu:0", tier.ID{Kind: tier.GPU}},
		{"host:1", tier.ID{Kind: tier.Host, Ordinal: 1}},
		{"disk:12", tier.ID{Kind: tier.Disk, Ordinal: 12}},
		{"disk:2147483647", tier.ID{Kind: tier.Disk, Ordinal: 1<<31 - 1}},
	} {
		if got := c.id.String(); got != c.text {
			t.Errorf("%+v prints as %q, want %q", c.id, got, c.text)
		}
		var got tier.ID
		if err := got.UnmarshalText([]byte(c.text)); got != c.id || err != nil {
			t.Errorf("UnmarshalText(%q) = %+v, %v", c.text, got, err)
		}
	}
	for _, s := range []string{
		"", ":", "gpu", "gpu:", ":0", "gpu:-1", "gpu:+1", "gpu:01", "gpu:00", "gpu: 0", "gpu:0 ", "gpu:0x1", "gpu:1_0",
		"GPU:0", "invalid:0", "gpu:0:0", "gpu:2147483648", "gpu:99999999999999999999", "gpu：0",
	} {
		var id tier.ID
		if err := id.UnmarshalText([]byte(s)); err == nil || id != (tier.ID{}) {
			t.Errorf("UnmarshalText(%q) = %+v, %v; want the zero id and an error", s, id, err)
		}
	}
	for _, id := range []tier.ID{{}, {Kind: tier.GPU, Ordinal: -1}, {Kind: 9}} {
		if id.Valid() {
			t.Errorf("%+v is valid", id)
		}
		if b, err := id.MarshalText(); err == nil {
			t.Errorf("%+v marshals to %q", id, b)
		}
	}
}

func TestIDInJSON(t *testing.T) {
	in := map[tier.ID]tier.ID{{Kind: tier.GPU}: {Kind: tier.Disk, Ordinal: 3}}
	b, err := json.Marshal(in)
	if err != nil || string(b) != `{"gpu:0":"disk:3"}` {
		t.Fatalf("marshals to %s, %v", b, err)
	}
	var out map[tier.ID]tier.ID
	if err := json.Unmarshal(b, &out); err != nil || !maps.Equal(out, in) {
		t.Fatalf("unmarshals to %v, %v", out, err)
	}
	id := tier.ID{Kind: tier.Host, Ordinal: 7}
	if err := id.UnmarshalText([]byte("nowhere:1")); err == nil || id != (tier.ID{Kind: tier.Host, Ordinal: 7}) {
		t.Errorf("after a text that is no id: %v, %v; want the id as it was and an error", id, err)
	}
}

// FuzzID: whatever parses prints as it was written, so that there is one
// text for each id.
func FuzzID(f *testing.F) {
	for _, s := range []string{"gpu:0", "host:10", "disk:2147483647", "gpu:00", "gpu:", ":", "disk:-1", "host:１"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var id tier.ID
		err := id.UnmarshalText([]byte(s))
		if err != nil {
			if id != (tier.ID{}) {
				t.Errorf("UnmarshalText(%q) = %+v with the error %v", s, id, err)
			}
			return
		}
		if !id.Valid() || id.String() != s {
			t.Errorf("UnmarshalText(%q) = %+v, which prints as %q", s, id, id)
		}
		text, err := id.MarshalText()
		if err != nil || string(text) != s {
			t.Errorf("%+v marshals to %q, %v", id, text, err)
		}
	})
}
