package holds

import "testing"

// TestList: a hold is listed from Begin to its first End, and each change raises Changes.
func TestList(t *testing.T) {
	var l List
	var never, a, b, c Hold
	never.End()
	changed := func(what string, f func(), want bool) {
		t.Helper()
		before := l.Changes()
		if f(); l.Changes() > before != want {
			t.Errorf("%s: changes from %d to %d", what, before, l.Changes())
		}
	}
	for h, kind := range map[*Hold]string{&a: Handle, &b: Record, &c: Handle} {
		changed("begin", func() { h.Begin(&l, View{Kind: kind, Bytes: 7}) }, true)
	}
	changed("owner", func() { b.SetOwner("me") }, true)
	changed("end", a.End, true)
	changed("the second end", a.End, false)
	changed("end", c.End, true)
	all := l.Append(make([]View, 1))
	if len(all) != 2 || all[1].Kind != Record || all[1].Owner != "me" || all[1].Bytes != 7 || b.Owner() != "me" {
		t.Errorf("%+v", all)
	}
	b.End()
	if all := l.Append(nil); len(all) != 0 {
		t.Errorf("%+v is left", all)
	}
}
