package named_test

import (
	"testing"

	"github.com/spillway-db/spillway/internal/named"
)

func TestAddress(t *testing.T) {
	for text, want := range map[string]string{
		"0000:3b:00.0": "0000:3b:00.0", "00000000:3B:00.0": "0000:3b:00.0", "3B:00.0": "0000:3b:00.0", "0:3b:00.0": "0000:3b:00.0",
		"00010000:E1:00.7": "10000:e1:00.7", "10000:e1:00.0": "10000:e1:00.0", "1:3b:1f.0": "0001:3b:1f.0",
		"": "", "../..": "", "0000:3b:00": "", "3b": "", "3b:00": "", ":3b:00.0": "", "000000000:3b:00.0": "", "0000:3b:00:0": "",
		"0000:3b:00.00": "", "000g:3b:00.0": "", "0000-3b:00.0": "", "0000:3b:00.0 ": "", "0000:0000:3b:00.0": "",
	} {
		if got := named.PCIAddress(text); got != want {
			t.Errorf("Address(%q) = %q, want %q", text, got, want)
		}
	}
	if !named.SameAddress("00000000:3B:00.0", "3b:00.0") || named.SameAddress("3b:00.0", "3c:00.0") ||
		named.SameAddress("", "") {
		t.Error("addresses are compared wrongly")
	}
}

func TestUUID(t *testing.T) {
	const uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
	for id, want := range map[string]struct{ same, begins bool }{
		uuid: {true, true},
		"MIG-8932F937-d72c-4106-c12f-20bd9faed9f6": {true, true},
		"gpu-8932f937-d72c-4106-c12f-20bd9faed9f6": {true, true},
		"8932f937-d72c-4106-c12f-20bd9faed9f6":     {true, false},
		"GPU-8932F937":                             {false, true},
		"GPU-8":                                    {false, true},
		"8932f937":                                 {},
		"8":                                        {},
		"GPU-":                                     {},
		"":                                         {},
		"GPU-9":                                    {},
		"GPU-8932f937-d72c-4106-c12f-20bd9faed9f6-0": {},
	} {
		if same, begins := named.SameUUID(id, uuid), named.BeginsUUID(id, uuid); same != want.same ||
			begins != want.begins {
			t.Errorf("%q: the same is %v, the beginning %v; want %v", id, same, begins, want)
		}
	}
	if named.SameUUID("", "") || named.SameUUID("GPU-", "MIG-") || named.BeginsUUID("GPU-1", "") {
		t.Error("no UUID is taken for one")
	}
}
