package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"

	"github.com/spillway-db/spillway/observe/timeline"
)

// What can be shown. A number beyond is of no run, and sums and quotients of such are nonsense.
const (
	mostCount  = 1 << 58                                       // bytes, or whatever is counted
	mostFloat  = float64(math.MaxInt64) / float64(time.Second) // seconds that a time.Duration holds
	leastFloat = 1e-12
)

// errInsane begins what sane says.
var errInsane = errors.New("it is no result that can be shown")

// sane checks what is used in arithmetic. A document can come from anywhere, and need not be
// what the schema says.
func sane(d Measured) error {
	if err := saneNumbers("", reflect.ValueOf(d)); err != nil {
		return fmt.Errorf("%w: %w", errInsane, err)
	}
	if c, ok := d.(*Compare); ok && (c.Ratio.Write < leastFloat || c.Ratio.Read < leastFloat) {
		return fmt.Errorf("%w: its ratio is %v and %v", errInsane, c.Ratio.Write, c.Ratio.Read)
	}
	if b, ok := d.(*Bandwidth); ok {
		for _, r := range b.Rows {
			if ours, limits := len(r.Samples.GiBPerS), len(r.Samples.LimitGiBPerS); ours != limits && r.Error == "" {
				return fmt.Errorf("%w: a row has %d samples, and %d of its limit", errInsane, ours, limits)
			}
		}
	}
	if r, ok := d.(*Run); ok && r.Timeline != nil {
		if err := saneTimeline(r.Timeline); err != nil {
			return fmt.Errorf("%w: %w", errInsane, err)
		}
	}
	return nil
}

// whole checks that a document has what its command always writes, and that something was measured. A run
// that failed may have no figures. Deeper down, what is missing counts as 0 or nothing.
func whole(text []byte, d Measured) error {
	var has map[string]json.RawMessage
	if err := json.Unmarshal(text, &has); err != nil {
		return fmt.Errorf("%w: %w", errInsane, err)
	}
	keys, err := required(d)
	if err != nil {
		return err
	}
	for _, key := range keys {
		if value := string(has[key]); value == "" || value == "null" {
			return fmt.Errorf("%w: it has no %s", errInsane, key)
		}
	}
	empty := ""
	switch d := d.(type) {
	case *Run:
		if d.Error != "" {
			break
		}
		if len(d.Phases) == 0 {
			empty = "phases"
		} else if len(d.Spaces) == 0 {
			empty = "spaces"
		}
	case *Bandwidth:
		if len(d.Rows) == 0 {
			empty = "rows"
		}
	}
	if d.header().Env == (Env{}) {
		empty = "env"
	}
	if empty != "" {
		return fmt.Errorf("%w: there is nothing in its %s", errInsane, empty)
	}
	return nil
}

// required lists the keys that the schema wants of a document.
func required(d Measured) ([]string, error) {
	var schema struct {
		Defs map[string]struct {
			Required []string `json:"required"`
		} `json:"$defs"`
	}
	if err := json.Unmarshal([]byte(jsonSchema), &schema); err != nil {
		return nil, err
	}
	return schema.Defs[reflect.TypeOf(d).Elem().Name()].Required, nil
}

// saneNumbers checks all numbers of a value. key is that of the document that it is at.
func saneNumbers(key string, v reflect.Value) error {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			return saneNumbers(key, v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			if err := saneNumbers(key, v.Index(i)); err != nil {
				return err
			}
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			if err := saneNumbers(key, it.Value()); err != nil {
				return err
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if name == "-" || !f.IsExported() {
				continue
			}
			if name == "" {
				name = key // embedded
			}
			if err := saneNumbers(name, v.Field(i)); err != nil {
				return err
			}
		}
	case reflect.Float64:
		n := v.Float()
		if most := math.Abs(n); most > mostFloat || n != 0 && most < leastFloat && divides(key) || n < 0 && strings.HasSuffix(key, "seconds") {
			return fmt.Errorf("its %s is %v", key, n)
		}
	case reflect.Int64:
		if n := v.Int(); n < -mostCount || n > mostCount || n < 0 && strings.HasSuffix(key, "bytes") {
			return fmt.Errorf("its %s is %d", key, n)
		}
	}
	return nil
}

// divides reports whether a page may divide by what is at the key. Elsewhere a tiny number is what is
// left of a difference.
func divides(key string) bool {
	return strings.HasSuffix(key, "seconds") || strings.HasSuffix(key, "_per_s")
}

// saneTimeline checks that series have as many values as there are intervals, or none.
func saneTimeline(t *timeline.Timeline) error {
	n := len(t.Waits.Ended)
	if n > 0 && t.IntervalSeconds <= 0 {
		return fmt.Errorf("its interval_seconds is %v", t.IntervalSeconds)
	}
	lengths := []int{len(t.Waits.Total), len(t.Waits.Longest), len(t.Tasks.Running), len(t.Tasks.Ended), len(t.Tasks.Failed)}
	for _, s := range t.Spaces {
		lengths = append(lengths, len(s.Used), len(s.Reserved), len(s.Copies), len(s.Foreign))
	}
	for _, e := range t.Edges {
		lengths = append(lengths, len(e.Bytes))
	}
	for _, c := range t.Causes {
		lengths = append(lengths, len(c.Moves), len(c.Bytes))
	}
	for _, have := range lengths {
		if have != 0 && have != n {
			return fmt.Errorf("a series of its timeline has %d values, and not %d", have, n)
		}
	}
	return nil
}
