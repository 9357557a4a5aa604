package tune

import (
	"fmt"
	"slices"
	"strings"
)

// Reason says in words why a setting has the value that it has, with what was measured.
func (r *Result) Reason(settings []Setting, setting int) string {
	set := settings[setting]
	var best *Trial // the value that was kept, or else was nearest to it
	untried := 0
	var refused []string
	for i := range r.Trials {
		t := &r.Trials[i]
		switch {
		case t.Setting != setting:
		case t.Outcome == Untried:
			untried++
		case t.Outcome == Refused:
			refused = append(refused, fmt.Sprintf("%s cannot be used here: %v", set.Values[t.Value], t.Err))
		case best == nil || rating(t) > rating(best) || rating(t) == rating(best) && t.Gain.Median > best.Gain.Median:
			best = t
		}
	}
	var parts []string
	switch {
	case best == nil && untried > 0:
		return "not tried: the budget has no room for it"
	case best == nil:
		return strings.Join(refused, "; ")
	}
	value, measured := set.Values[best.Value], best.Gain.Words(r.Variation)
	switch best.Outcome {
	case Kept:
		parts = append(parts, fmt.Sprintf("%s was %s", value, best.Gain.words(r.Variation, set.Default)))
	case Unsure:
		parts = append(parts, fmt.Sprintf("%s was %s at first, but not in the last comparison", value, measured))
	case Slower, Tie:
		if best.Gain.Median >= 0 {
			parts = append(parts, fmt.Sprintf("no value was faster by more than runs vary; the best, %s, was %s", value, measured))
			break
		}
		parts = append(parts, fmt.Sprintf("%s was %s", value, measured))
	}
	if untried > 0 {
		parts = append(parts, fmt.Sprintf("%d more not tried", untried))
	}
	return strings.Join(append(parts, refused...), "; ")
}

// rating is how near a trial is to being kept.
func rating(t *Trial) int {
	return slices.Index([]Outcome{Slower, Tie, Second, Unsure, Kept}, t.Outcome)
}

// Words says it in words: "6.1 % faster (2.0 to 8.8 % in 7 runs)", and without figures if it is vague.
func (g Gain) Words(variation float64) string { return g.words(variation, "") }

// words says it beside another value, if there is one.
func (g Gain) words(variation float64, than string) string {
	if than != "" {
		than = " than " + than
	}
	word := "faster"
	median, low, high := g.Median, g.Low, g.High
	if median < 0 { // in time: 25 % slower takes 125 seconds for 100
		word = "slower"
		slower := func(gain float64) float64 { return 1/(1+gain) - 1 }
		median, low, high = slower(median), slower(high), slower(low)
	}
	switch n := len(g.Samples); {
	case n < 2:
		return word + than + " in the only run"
	case g.Vague(variation):
		return fmt.Sprintf("%s%s in the median of %d runs, which vary too much for a figure", word, than, n)
	default:
		return fmt.Sprintf("%.1f %% %s (%.1f to %.1f %% in %d runs)%s", 100*median, word, 100*low, 100*high, n, than)
	}
}
