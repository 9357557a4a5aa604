package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"strings"
	"time"
)

// Read reads a document of run, bandwidth or compare. It doesn't trust the text: it checks that the
// document has the parts and the numbers that the other functions of this package rely on.
func Read(text []byte) (Document, error) {
	if !json.Valid(text) {
		return nil, errors.New("it is no JSON")
	}
	var head Header
	err := json.Unmarshal(text, &head)
	kinds := map[string]Document{"run": new(Run), "bandwidth": new(Bandwidth), "compare": new(Compare)}
	doc, known := kinds[head.Command]
	switch {
	case err != nil:
	case head.Schema != Schema:
		err = fmt.Errorf("its schema is %q, and not %q", head.Schema, Schema)
	case !known:
		err = fmt.Errorf("it is one of %q", head.Command)
	default:
		err = decode(text, doc)
	}
	if err != nil {
		return nil, fmt.Errorf("it is no result of run, bandwidth or compare: %w", inPlainWords(err))
	}
	return doc, nil
}

// embedded matches the names of embedded structs in the path of a JSON value. Keys are in small letters.
var embedded = regexp.MustCompile(`\b[A-Z]\w*\.`)

// inPlainWords names the place of a value of another type than the schema's, without Go's type names.
// It returns other errors as they are.
func inPlainWords(err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	field := embedded.ReplaceAllString(wrong.Field, "")
	return fmt.Errorf("%s: unexpected %s", cmp.Or(field, "the document"), wrong.Value)
}

// Bounds of numbers, within which calculations neither overflow nor divide by 0. No run reaches them.
const (
	maxCount   = 1 << 58 // bytes, or anything else that is counted
	maxSeconds = float64(math.MaxInt64 / time.Second)
	minDivisor = 1e-12
)

var (
	keyOfSeconds = regexp.MustCompile(`seconds$|^p50$|^p99$|^p999$|^max$`)
	neverEmpty   = regexp.MustCompile(`^(env|phases|spaces|rows)$`) // unless the command failed
)

// decode decodes text into d and checks the properties that the type of d doesn't guarantee.
func decode(text []byte, d Document) error {
	if err := json.Unmarshal(text, d); err != nil {
		return err
	}
	intervals := 0
	switch d := d.(type) {
	case *Run:
		if t := d.Timeline; t != nil {
			intervals = len(t.Waits.Ended)
			if intervals > 0 && t.IntervalSeconds <= 0 {
				return fmt.Errorf("its interval_seconds is %v", t.IntervalSeconds)
			}
		}
	case *Bandwidth:
		for _, r := range d.Rows {
			if ours, limit := len(r.Samples.GiBPerS), len(r.Samples.LimitGiBPerS); ours != limit && r.Error == "" {
				return fmt.Errorf("a row has %d samples, and %d of its limit", ours, limit)
			}
		}
	case *Compare:
		if d.Ratio.Write < minDivisor || d.Ratio.Read < minDivisor {
			return fmt.Errorf("its ratio is %v and %v", d.Ratio.Write, d.Ratio.Read)
		}
	}
	// The numbers to check are the decoded ones: encoding/json ignores the case of keys and merges duplicates.
	var decoded, given map[string]any
	var schema struct {
		Defs map[string]struct {
			Required []string `json:"required"`
		} `json:"$defs"`
	}
	again, err := json.Marshal(d)
	err = errors.Join(err, json.Unmarshal(again, &decoded), json.Unmarshal(text, &given),
		json.Unmarshal([]byte(jsonSchema), &schema))
	if err != nil {
		return err
	}
	if err := cmp.Or(checkNumbers("", decoded, -1), checkNumbers("", decoded["timeline"], intervals)); err != nil {
		return err
	}
	for _, key := range schema.Defs[reflect.TypeOf(d).Elem().Name()].Required {
		switch value := reflect.ValueOf(given[key]); {
		case !value.IsValid():
			return fmt.Errorf("it has no %s", key)
		case neverEmpty.MatchString(key) && value.Len() == 0 && FailureOf(d) == "":
			return fmt.Errorf("there is nothing in its %s", key)
		}
	}
	return nil
}

// checkNumbers checks all numbers in the value of a key. Unless length is negative, lists of numbers must
// be empty or have this length.
func checkNumbers(key string, value any, length int) error {
	switch v := value.(type) {
	case map[string]any:
		for k, one := range v {
			if err := checkNumbers(k, one, length); err != nil {
				return err
			}
		}
	case []any:
		for _, one := range v {
			if _, ok := one.(map[string]any); !ok && length >= 0 && len(v) != length {
				return fmt.Errorf("a series of its timeline has %d values, and not %d", len(v), length)
			}
			if err := checkNumbers(key, one, length); err != nil {
				return err
			}
		}
	case float64:
		size, limit, seconds := math.Abs(v), float64(maxCount), keyOfSeconds.MatchString(key)
		if seconds {
			limit = maxSeconds
		}
		switch rate := strings.HasSuffix(key, "_per_s"); {
		case size > limit && key != "seed",
			0 < size && size < minDivisor && (seconds || rate),
			v < 0 && (seconds || strings.HasSuffix(key, "bytes")):
			return fmt.Errorf("its %s is %v", key, v)
		}
	}
	return nil
}
