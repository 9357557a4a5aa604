package report

import _ "embed"

//go:embed schema/spillbench.v1.schema.json
var jsonSchema string

// JSONSchema returns the JSON Schema (draft 2020-12) of all documents of version Schema. It has each
// key that they have, and allows no other.
func JSONSchema() string { return jsonSchema }
