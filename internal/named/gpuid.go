package named

import "strings"

// NVML, nvidia-smi, CUDA and the kernel write the same address and the same UUID of a GPU in different
// ways, and people copy any of them into a configuration. The functions below compare them.
//
//	PCIAddress  the kernel's form of a PCI address: 00000000:17:00.0, 17:00.0 and 0000:17:00.0 are one
//	SameUUID    GPU-… of CUDA, MIG-… of NVML and the bare digits are one
//	BeginsUUID  GPU-8932f937 is enough of a UUID, as in CUDA_VISIBLE_DEVICES

// PCIAddress returns the kernel's form of a PCI address: lower case, and four digits for the domain
// unless it needs more. nvidia-smi writes eight, and lspci leaves domain 0 out. Empty: s is no
// address.
func PCIAddress(s string) string {
	parts := strings.Split(strings.ToLower(s), ":")
	if len(parts) == 2 {
		parts = append([]string{"0000"}, parts...)
	}
	if len(parts) != 3 {
		return ""
	}
	domain, bus, slot := parts[0], parts[1], parts[2]
	if len(domain) < 1 || len(domain) > 8 || len(bus) != 2 || len(slot) != len("00.0") || slot[2] != '.' {
		return ""
	}
	if digits := domain + bus + slot[:2] + slot[3:]; strings.Trim(digits, "0123456789abcdef") != "" {
		return ""
	}
	domain = strings.TrimLeft(domain, "0")
	return strings.Repeat("0", max(0, 4-len(domain))) + domain + ":" + bus + ":" + slot
}

// SameAddress reports whether both are PCI addresses, and of the same device.
func SameAddress(a, b string) bool {
	x := PCIAddress(a)
	return x != "" && x == PCIAddress(b)
}

// SameUUID reports whether both are UUIDs, and of the same GPU or instance. What is written before
// the digits does not count: NVML calls an instance MIG-… that CUDA calls GPU-….
func SameUUID(a, b string) bool {
	x, _ := digits(a)
	y, _ := digits(b)
	return x != "" && strings.EqualFold(x, y)
}

// BeginsUUID reports whether id is the beginning of a UUID. It must have the GPU- or MIG- before
// it: a few bare digits may as well be meant for an index.
func BeginsUUID(id, uuid string) bool {
	x, marked := digits(id)
	y, _ := digits(uuid)
	return marked && x != "" && len(x) <= len(y) && strings.EqualFold(x, y[:len(x)])
}

// digits returns a UUID without the prefix for its kind, and whether that was there.
func digits(uuid string) (rest string, marked bool) {
	const mark = len("GPU-")
	if len(uuid) >= mark {
		if m := uuid[:mark]; strings.EqualFold(m, "GPU-") || strings.EqualFold(m, "MIG-") {
			return uuid[mark:], true
		}
	}
	return uuid, false
}
