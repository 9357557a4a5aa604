package main

import (
	"os"
	"strings"
	"testing"
)

func Example() {
	main()
	// Output:
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
	// 65536 rows in gpu:0
}

// TestReadmeHasThisProgram: README's program is main.go, without its first comment.
func TestReadmeHasThisProgram(t *testing.T) {
	source, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	_, program, _ := strings.Cut(string(source), "\n")
	if !strings.HasPrefix(program, "package main\n") {
		t.Fatal("main.go does not begin with one line of comment")
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "\n```go\n"+program+"```\n") {
		t.Error("README.md does not have the program of examples/hello/main.go")
	}
}
