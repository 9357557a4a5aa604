// The race detector would compile the engine of Prometheus once more, and no goroutines meet here.

//go:build !race

package spillwayprom_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/observe/spillwayprom"
	"github.com/spillway-db/spillway/test/busyengine"
)

// ofTargets are the labels that Prometheus itself gives to all that it scrapes at one place.
var ofTargets = []string{"instance", "job"}

// exposition is what a real engine shows after work, as series by the metric's name.
type exposition map[string][]map[string]string

func exposed(t *testing.T) exposition {
	t.Helper()
	eng := busyengine.Open(t, func(c *spillway.Config) { c.Limits.Permits.Slots = new(8) })
	if err := busyengine.Work(t.Context(), eng, testseed.One(t), 60); err != nil {
		t.Error(err)
	}
	all := exposition{}
	for _, s := range parse(t, serve(t, spillwayprom.NewCollector(eng.Stats, spillwayprom.Options{Labels: prometheus.Labels{"engine": "a"}}))) {
		all[s.name] = append(all[s.name], s.labels)
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	return all
}

// check returns what is wrong with an expression, and the labels that its result has.
func (x exposition) check(expr string) (wrong []string, result map[string]bool) {
	parsed, err := parser.ParseExpr(expr)
	if err != nil {
		return []string{err.Error()}, nil
	}
	selected := 0
	has := func(of parser.Node) map[string]bool { return x.labels(of) }
	parser.Inspect(parsed, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			selected++
			wrong = append(wrong, x.selects(n)...)
		case *parser.AggregateExpr:
			for _, l := range n.Grouping {
				if !has(n.Expr)[l] {
					wrong = append(wrong, fmt.Sprintf("%s has no label %s to group by", n.Expr, l))
				}
			}
		case *parser.BinaryExpr:
			if n.VectorMatching == nil {
				break
			}
			for _, l := range n.VectorMatching.MatchingLabels {
				if !has(n.LHS)[l] || !has(n.RHS)[l] {
					wrong = append(wrong, fmt.Sprintf("%s: a side has no label %s", n, l))
				}
			}
			if left, right := has(n.LHS), has(n.RHS); !n.VectorMatching.On && len(n.VectorMatching.MatchingLabels) == 0 && !maps.Equal(left, right) {
				wrong = append(wrong, fmt.Sprintf("%s: the sides have other labels, %v and %v, so that nothing matches", n, left, right))
			}
		}
		return nil
	})
	if selected == 0 {
		wrong = append(wrong, "it asks for no metric")
	}
	return wrong, x.labels(parsed)
}

// selects returns what is wrong with a selector: there must be a series that it selects.
func (x exposition) selects(s *parser.VectorSelector) (wrong []string) {
	series := x[s.Name]
	if len(series) == 0 {
		return []string{s.Name + " is no metric of the engine"}
	}
	found := slices.ContainsFunc(series, func(have map[string]string) bool {
		for _, m := range s.LabelMatchers {
			if m.Name == model.MetricNameLabel || slices.Contains(ofTargets, m.Name) {
				continue
			}
			if _, ok := have[m.Name]; !ok || !m.Matches(have[m.Name]) {
				return false
			}
			if m.Type != labels.MatchRegexp {
				continue
			}
			for _, one := range strings.Split(m.Value, "|") { // each alternative is some series'
				if !slices.ContainsFunc(series, func(of map[string]string) bool { return regexp.MustCompile("^(" + one + ")$").MatchString(of[m.Name]) }) {
					return false
				}
			}
		}
		return true
	})
	if !found {
		wrong = append(wrong, fmt.Sprintf("no series of the engine is %s", s))
	}
	return wrong
}

// labels returns the labels that the result of an expression has.
func (x exposition) labels(n parser.Node) map[string]bool {
	all := map[string]bool{}
	switch n := n.(type) {
	case *parser.VectorSelector:
		for _, l := range ofTargets {
			all[l] = true
		}
		for _, s := range x[n.Name] {
			for l := range s {
				all[l] = true
			}
		}
	case *parser.AggregateExpr:
		if n.Op == parser.TOPK {
			return x.labels(n.Expr)
		}
		if n.Without {
			all = x.labels(n.Expr)
			for _, l := range n.Grouping {
				delete(all, l)
			}
			break
		}
		for _, l := range n.Grouping {
			all[l] = true
		}
	default:
		for child := range parser.ChildrenIter(n) {
			maps.Copy(all, x.labels(child))
		}
	}
	return all
}

// The check finds what is wrong with an expression.
func TestExpressionsCanFail(t *testing.T) {
	x := exposed(t)
	for expr, ok := range map[string]bool{
		`spillway_space_held_bytes{kind="live"}`:                                   true,
		`sum by (kind) (rate(spillway_space_held_bytes[5m]))`:                      true,
		`spillway_monitor_moves_total{outcome=~"failed|unmovable"}`:                true,
		`spillway_space_held_bytes{kind="alive"}`:                                  false,
		`spillway_space_held_bytes{sort="live"}`:                                   false,
		`spillway_space_hold_bytes`:                                                false,
		`sum by (sort) (spillway_space_held_bytes)`:                                false,
		`sum by (kind) (sum by (space) (spillway_space_held_bytes))`:               false,
		`spillway_monitor_moves_total{outcome=~"failed|unmoved"}`:                  false,
		`spillway_space_held_bytes / spillway_space_capacity_bytes`:                false,
		`spillway_space_peak_bytes / on (kind) spillway_space_capacity_bytes`:      false,
		`sum(spillway_space_held_bytes`:                                            false,
		`1 + 1`:                                                                    false,
		`spillway_space_peak_bytes / on (space) spillway_space_capacity_bytes > 1`: true,
	} {
		if wrong, _ := x.check(expr); (len(wrong) == 0) != ok {
			t.Errorf("%s: %q", expr, wrong)
		}
	}
}

// read reads a file of deploy.
func read(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Each query of the dashboard asks for metrics and labels that an engine has, each legend for
// labels that the query's result has, and each panel takes its data from the variable.
func TestDashboard(t *testing.T) {
	x := exposed(t)
	type source struct{ Type, UID string }
	var board struct {
		Templating struct {
			List []struct {
				Name, Type, Definition string
				Datasource             source
			}
		}
		Panels []struct {
			ID                       int
			Title, Type, Description string
			Datasource               source
			Repeat                   string
			GridPos                  struct{ H, W, X, Y int }
			FieldConfig              struct{ Defaults struct{ Unit string } }
			Targets                  []struct {
				Expr, LegendFormat, RefID string
				Datasource                source
			}
		}
	}
	if err := json.Unmarshal(read(t, "grafana-dashboard.json"), &board); err != nil {
		t.Fatal(err)
	}
	variable := map[string]bool{}
	values := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`)
	for _, v := range board.Templating.List {
		variable[v.Name] = true
		if v.Type == "datasource" || v.Type == "adhoc" && v.Datasource.UID == "${datasource}" {
			continue
		}
		m := values.FindStringSubmatch(v.Definition)
		if m == nil {
			t.Errorf("the variable %s is %q", v.Name, v.Definition)
			continue
		}
		if wrong, has := x.check(filled(m[1])); len(wrong) > 0 || !has[m[2]] {
			t.Errorf("the variable %s: %q", v.Name, wrong)
		}
	}
	used := regexp.MustCompile(`\$(\w+)|\$\{(\w+)\}`)
	legend := regexp.MustCompile(`\{\{(\w+)\}\}`)
	ids, places, queries := map[int]bool{}, map[string]bool{}, 0
	for _, p := range board.Panels {
		at := fmt.Sprint(p.GridPos.X, " ", p.GridPos.Y)
		if ids[p.ID] || places[at] || p.GridPos.X+p.GridPos.W > 24 || p.Title == "" {
			t.Errorf("the panel %q lies on another, or has its number", p.Title)
		}
		ids[p.ID], places[at] = true, true
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 || p.Repeat != "" && !variable[p.Repeat] {
			t.Errorf("the panel %q lacks something", p.Title)
		}
		for _, q := range p.Targets {
			queries++
			if q.Datasource.UID != "${datasource}" || q.RefID == "" {
				t.Errorf("%s: the source is %q", q.Expr, q.Datasource.UID)
			}
			for _, m := range used.FindAllStringSubmatch(q.Expr, -1) {
				if name := m[1] + m[2]; !variable[name] && name != "__rate_interval" && name != "__range" {
					t.Errorf("%s: there is no variable %s", q.Expr, name)
				}
			}
			if strings.Count(q.Expr, "spillway_") != strings.Count(q.Expr, `{instance=~"$instance", engine=~"$engine"`) {
				t.Errorf("%s: not all is of the instances and engines that are chosen", q.Expr)
			}
			wrong, has := x.check(filled(q.Expr))
			for _, w := range wrong {
				t.Errorf("the panel %q: %s", p.Title, w)
			}
			for _, m := range legend.FindAllStringSubmatch(q.LegendFormat, -1) {
				if !has[m[1]] {
					t.Errorf("%s has no label %s for its legend", q.Expr, m[1])
				}
			}
		}
	}
	if queries < 40 {
		t.Errorf("%d queries: those are not all", queries)
	}
}

// filled returns a query with values for Grafana's variables.
func filled(query string) string {
	return strings.NewReplacer("$__rate_interval", "5m", "$__range", "1h", "$instance", ".*", "$engine", ".*", "$space", "gpu:0").Replace(query)
}

// rule is one alert of deploy/prometheus-rules.yaml.
type rule struct {
	Alert       string
	Expr        string
	For         string
	Labels      map[string]string
	Annotations map[string]string
}

// rules returns the alerts. Fields that Prometheus does not know are an error.
func rules(t *testing.T) (all []rule) {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	d := yaml.NewDecoder(strings.NewReader(string(read(t, "prometheus-rules.yaml"))))
	d.KnownFields(true)
	if err := d.Decode(&file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) < 8 {
		t.Fatalf("%d alerts: those are not all", len(all))
	}
	return all
}

// Each alert asks for metrics and labels that an engine has, and its text for labels that the
// expression's result has.
func TestRules(t *testing.T) {
	x := exposed(t)
	functions := template.FuncMap{}
	for _, f := range []string{"humanize", "humanize1024", "humanizeDuration", "humanizePercentage"} {
		functions[f] = func(any) string { return f }
	}
	seen := map[string]bool{}
	for _, r := range rules(t) {
		if seen[r.Alert] || !regexp.MustCompile(`^Spillway[A-Z]\w+$`).MatchString(r.Alert) || !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
			t.Errorf("%q with %v", r.Alert, r.Labels)
		}
		seen[r.Alert] = true
		if r.For != "" {
			if _, err := model.ParseDuration(r.For); err != nil {
				t.Errorf("%s: %v", r.Alert, err)
			}
		}
		wrong, has := x.check(r.Expr)
		for _, w := range wrong {
			t.Errorf("%s: %s", r.Alert, w)
		}
		given := map[string]string{}
		for l := range has {
			given[l] = "a " + l
		}
		for _, name := range []string{"summary", "description"} {
			text, err := template.New(r.Alert).Option("missingkey=error").Funcs(functions).Parse("{{$labels := .Labels}}{{$value := .Value}}" + r.Annotations[name])
			if err == nil {
				err = text.Execute(&strings.Builder{}, map[string]any{"Labels": given, "Value": 1.5})
			}
			if err != nil || r.Annotations[name] == "" {
				t.Errorf("%s: its %s is %q: %v", r.Alert, name, r.Annotations[name], err)
			}
		}
	}
}

// docs/operating.md says of each alert what to do, and has no other.
func TestDocsOfAlerts(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "operating.md"))
	if err != nil {
		t.Fatal(err)
	}
	var want, have []string
	for _, r := range rules(t) {
		want = append(want, r.Alert+" "+r.Labels["severity"])
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `(Spillway\\w+)` \\| (\\w+) \\|").FindAllSubmatch(page, -1) {
		have = append(have, string(m[1])+" "+string(m[2]))
	}
	if !slices.Equal(have, want) {
		t.Errorf("the page has %q, not %q", have, want)
	}
}
