package quota

// ParseRatio reads an oversubscription ratio.
var ParseRatio = parseRatio
