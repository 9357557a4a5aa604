package page

import (
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
)

// IsLocal reports whether a request comes from this machine and names this machine as its host. Without
// the second check a page of another site could resolve a name of its own to a loopback address and read
// the answer. A request that a proxy on this machine forwards is local.
func IsLocal(req *http.Request) bool {
	remote, err := netip.ParseAddrPort(req.RemoteAddr)
	socket := strings.HasPrefix(req.RemoteAddr, "@") || req.RemoteAddr == "" // of a file, which has no address
	if !socket && (err != nil || !remote.Addr().Unmap().IsLoopback()) {
		return false
	}
	name, _, err := net.SplitHostPort(req.Host)
	if err != nil {
		name = strings.Trim(req.Host, "[]")
	}
	ip, err := netip.ParseAddr(name)
	return strings.EqualFold(name, "localhost") || err == nil && ip.Unmap().IsLoopback()
}

// Serve answers a request with the page, or with its data if the query is "data". It ignores the path,
// so it works behind any prefix: the page requests its own address. It allows only GET and HEAD.
func Serve(w http.ResponseWriter, req *http.Request, report func() *Report) {
	h := w.Header()
	for name, value := range map[string]string{
		"X-Content-Type-Options":       "nosniff",
		"Referrer-Policy":              "no-referrer",
		"Cross-Origin-Resource-Policy": "same-origin",
		"Cross-Origin-Opener-Policy":   "same-origin",
		"Cache-Control":                "no-store",
		"Content-Security-Policy":      fixed().header,
	} {
		h.Set(name, value)
	}
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD are allowed", http.StatusMethodNotAllowed)
		return
	}
	var text []byte
	var err error
	if req.URL.RawQuery == "data" {
		h.Set("Content-Type", "application/json; charset=utf-8")
		text, err = report().update()
	} else {
		h.Set("Content-Type", "text/html; charset=utf-8")
		text, err = report().render("page")
	}
	if err != nil { // a bug: a wrong template, or a NaN
		http.Error(w, "the report cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	h.Set("Content-Length", strconv.Itoa(len(text)))
	if req.Method == http.MethodGet {
		_, _ = w.Write(text) // the client may have disconnected
	}
}
