package volumes

import (
	"errors"
	"testing"
)

func TestJoin(t *testing.T) {
	a, b, c := errors.New("a"), errors.New("b"), errors.New("c")
	for _, k := range []struct {
		errs []error
		want string
	}{
		{nil, ""}, {[]error{nil, nil}, ""}, {[]error{nil, a}, "a"}, {[]error{a, nil, b}, "a; then b"}, {[]error{a, b, c}, "a; then b; then c"},
	} {
		err := join(k.errs...)
		if (err == nil) != (k.want == "") || err != nil && err.Error() != k.want {
			t.Errorf("%v became %v", k.errs, err)
		}
		for _, e := range k.errs {
			if e != nil && !errors.Is(err, e) {
				t.Errorf("%v does not wrap %v", err, e)
			}
		}
	}
}
