package inject

import (
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Spec{
		"op=read,kind=eio":                       {Op: "read", Kind: "eio"},
		"kind=enospc,op=write":                   {Op: "write", Kind: "enospc"},
		"op=read,kind=short,p=0.25":              {Op: "read", Kind: "short", Probability: 0.25},
		"op=write,kind=bitflip,at=7":             {Op: "write", Kind: "bitflip", At: 7, Times: 1},
		"op=write,kind=eio,at=7,times=3":         {Op: "write", Kind: "eio", At: 7, Times: 3},
		"op=read,kind=eio,p=1,times=2":           {Op: "read", Kind: "eio", Probability: 1, Times: 2},
		"op=read,kind=slow":                      {Op: "read", Kind: "slow", Delay: 10 * time.Millisecond},
		"op=copy,kind=slow:1.5":                  {Op: "copy", Kind: "slow", Delay: 1500 * time.Microsecond},
		"op=write,kind=eio,path=/mnt/*/x,at=1":   {Op: "write", Kind: "eio", Path: "/mnt/*/x", At: 1, Times: 1},
		"op=alloc,kind=oom,at=2":                 {Op: "alloc", Kind: "oom", At: 2, Times: 1},
		"op=alloc,kind=eio":                      {Op: "alloc", Kind: "eio"},
		"op=copy,kind=bitflip,p=1e-3,times=10":   {Op: "copy", Kind: "bitflip", Probability: 0.001, Times: 10},
		"op=write,kind=slow:60000,path=seg=ment": {Op: "write", Kind: "slow", Delay: time.Minute, Path: "seg=ment"},
	} {
		want.Text = text
		if got, err := Parse(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
}

// TestParseRefuses: each message quotes what is wrong and says what would be right.
func TestParseRefuses(t *testing.T) {
	for text, want := range map[string][]string{
		"":                                   {`""`, Example},
		"read":                               {`"read"`, Example},
		"op=read,":                           {`""`, Example},
		"op=read,kind=":                      {`"kind="`, Example},
		"op=read kind=eio":                   {`"op=read kind=eio"`, "read, write, alloc or copy"},
		"op=seek,kind=eio":                   {`"op=seek"`, "read, write, alloc or copy"},
		"op=read,kind=boom":                  {`"kind=boom"`, "eio, enospc, short, bitflip, oom or slow"},
		"op=read,kind=EIO":                   {`"kind=EIO"`, "eio, enospc"},
		"kind=eio":                           {`"kind=eio"`, "add op=read"},
		"op=alloc":                           {`"op=alloc"`, "add kind=oom"},
		"op=read,op=write,kind=eio":          {`"op=write"`, "twice"},
		"op=read,kind=eio,when=3":            {`"when=3"`, `"when"`, "op, kind, p, at, times or path"},
		"op=read,kind=eio:5":                 {`"kind=eio:5"`, "kind=eio", "slow:5"},
		"op=read,kind=slow:":                 {`"kind=slow:"`, "milliseconds", "slow:5"},
		"op=read,kind=slow:0":                {`"kind=slow:0"`, "above 0"},
		"op=read,kind=slow:-1":               {`"kind=slow:-1"`, "above 0"},
		"op=read,kind=slow:NaN":              {`"kind=slow:NaN"`, "above 0"},
		"op=read,kind=slow:60001":            {`"kind=slow:60001"`, "60000"},
		"op=read,kind=slow:5ms":              {`"kind=slow:5ms"`, "milliseconds"},
		"op=read,kind=eio,p=0":               {`"p=0"`, "above 0"},
		"op=read,kind=eio,p=1.01":            {`"p=1.01"`, "at most 1"},
		"op=read,kind=eio,p=NaN":             {`"p=NaN"`, "probability"},
		"op=read,kind=eio,p=5%":              {`"p=5%"`, "p=0.01"},
		"op=read,kind=eio,at=0":              {`"at=0"`, "1 for the first"},
		"op=read,kind=eio,at=-1":             {`"at=-1"`, "1 for the first"},
		"op=read,kind=eio,at=1.5":            {`"at=1.5"`, "1 for the first"},
		"op=read,kind=eio,at=99999999999999": {`"at=99999999999999"`, "1 for the first"},
		"op=read,kind=eio,times=0":           {`"times=0"`, "1 or more"},
		"op=read,kind=eio,path=[":            {`"path=["`, "/mnt/*"},
		"op=read,kind=eio,p=0.5,at=3":        {"p and at exclude each other"},
		// What cannot happen is refused by name.
		"op=read,kind=enospc":           {"enospc cannot happen to a read", "kind=eio, kind=short"},
		"op=read,kind=oom":              {"oom cannot happen to a read"},
		"op=write,kind=oom":             {"oom cannot happen to a write", "kind=enospc"},
		"op=alloc,kind=bitflip":         {"bitflip cannot happen to an allocation", "kind=oom"},
		"op=alloc,kind=short":           {"short cannot happen to an allocation"},
		"op=alloc,kind=enospc":          {"enospc cannot happen to an allocation", "kind=oom"},
		"op=copy,kind=short":            {"short cannot happen to a copy"},
		"op=copy,kind=enospc":           {"enospc cannot happen to a copy"},
		"op=copy,kind=oom":              {"oom cannot happen to a copy", "kind=eio"},
		"op=alloc,kind=oom,path=/tmp":   {"an allocation of device memory has no path"},
		"op=copy,kind=eio,path=/tmp":    {"a copy from or to a device has no path"},
		"op=\n,kind=eio":                {`"op=\n"`},
		"op=read,kind=eio,at=1,at=2":    {`"at=2"`, "twice"},
		"op=read,kind=eio,=3":           {`"=3"`, "there is no key"},
		"op=read,kind=eio,path=":        {`"path="`, Example},
		"op=read,kind=slow:5,times=1e3": {`"times=1e3"`, "1 or more"},
	} {
		_, err := Parse(text)
		if err == nil {
			t.Errorf("%q was taken", text)
			continue
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %q does not say %q", text, err, w)
			}
		}
		if strings.Contains(err.Error(), "\n") || !strings.HasSuffix(err.Error(), ")") {
			t.Errorf("%q: %q is not one line with a fix at its end", text, err)
		}
	}
}

// FuzzParse: whatever is taken can happen, and says so again.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"op=read,kind=eio", "op=write,kind=slow:5,p=0.5", "op=alloc,kind=oom,at=3,times=2",
		"op=read,kind=short,path=/a/*",
		"op=copy,kind=bitflip",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: %q is more than a line", text, err)
			}
			return
		}
		if s.Text != text || s.Op == "" || s.Kind == "" || s.At < 0 || s.Times < 0 || s.Probability < 0 ||
			s.Probability > 1 ||
			s.Delay < 0 ||
			s.Delay > maxDelay {
			t.Errorf("%q: %+v", text, s)
		}
		again, err := Parse(s.Text)
		if err != nil || again != s {
			t.Errorf("%q: %+v, %v", text, again, err)
		}
	})
}
