package page

import (
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
)

// IsLocal reports whether a request is one of this machine to this machine. The Host must be, too: a
// page of another site can have a browser ask a name of its own that leads here, and would read the
// answer. What a proxy on this machine passes on is local by that.
func IsLocal(req *http.Request) bool { return fromHere(req.RemoteAddr) && isHere(req.Host) }

// fromHere is for an address as package net/http has it. That of a socket of a file has no port.
func fromHere(remote string) bool {
	at, err := netip.ParseAddrPort(remote)
	return err == nil && at.Addr().Unmap().IsLoopback() || strings.HasPrefix(remote, "@") || remote == ""
}

func isHere(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	ip, err := netip.ParseAddr(name)
	return strings.EqualFold(name, "localhost") || err == nil && ip.Unmap().IsLoopback()
}

// Serve answers a request with the page, and with its data if the query is "data". It ignores the
// path, so that it works behind any prefix: the page asks its own address. Nothing but GET and HEAD is
// allowed, and nothing is changed by them.
func Serve(w http.ResponseWriter, req *http.Request, report func() *Report) {
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", fixed().policy)
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
	if err != nil { // a template or a number that is none: a mistake of ours
		http.Error(w, "the report cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	h.Set("Content-Length", strconv.Itoa(len(text)))
	if req.Method == http.MethodGet {
		_, _ = w.Write(text) // who asked may have gone
	}
}
