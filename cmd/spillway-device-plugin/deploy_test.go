package main

import (
	"cmp"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

const deploy = "../../deploy"

// TestManifests checks that each manifest has a published type and no unknown fields, and that the manifests
// fit together.
func TestManifests(t *testing.T) {
	paths, err := filepath.Glob(deploy + "/*.yaml")
	if err != nil || len(paths) < 2 {
		t.Fatal(paths, err)
	}
	names := map[string]bool{}
	for _, resource := range []string{"resource", "whole-resource", "shared-resource"} {
		names[newRoot(io.Discard).Flags().Lookup(resource).DefValue] = true
	}
	var class resourceapi.DeviceClass
	var account v1.ServiceAccount
	var role rbacv1.ClusterRole
	var binding rbacv1.ClusterRoleBinding
	var policy admissionv1.ValidatingAdmissionPolicy
	var enforced admissionv1.ValidatingAdmissionPolicyBinding
	claims, offered := map[string]string{}, map[string]resourceapi.ResourceClaimSpec{} // by name
	for _, path := range paths {
		if filepath.Base(path) == "prometheus-rules.yaml" {
			continue // is no manifest; the module observe/spillwayprom tests it
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, doc := range strings.Split(string(text), "\n---\n") {
			var kind metav1.TypeMeta
			if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			switch kind.APIVersion + " " + kind.Kind {
			case "apps/v1 DaemonSet":
				var set appsv1.DaemonSet
				if err := yaml.UnmarshalStrict([]byte(doc), &set); err != nil {
					t.Errorf("%s: %v", path, err)
				}
				checkDaemonSet(t, &set)
			case "v1 Pod":
				var pod v1.Pod
				if err := yaml.UnmarshalStrict([]byte(doc), &pod); err != nil {
					t.Errorf("%s: %v", path, err)
				}
				for _, c := range pod.Spec.Containers {
					for name := range c.Resources.Limits {
						if !names[string(name)] {
							t.Errorf("%s: %s is no resource of the plugin", pod.Name, name)
						}
					}
				}
				for _, c := range pod.Spec.Containers {
					for _, of := range c.Resources.Claims {
						if !slices.ContainsFunc(
							pod.Spec.ResourceClaims,
							func(p v1.PodResourceClaim) bool { return p.Name == of.Name },
						) {
							t.Errorf("%s: the pod has no claim %s", pod.Name, of.Name)
						}
					}
				}
				for _, c := range pod.Spec.ResourceClaims {
					claims[cmp.Or(value(c.ResourceClaimName), value(c.ResourceClaimTemplateName))] = "wanted"
				}
			case "resource.k8s.io/v1 DeviceClass":
				strict(t, path, doc, &class)
			case "resource.k8s.io/v1 ResourceClaim":
				var claim resourceapi.ResourceClaim
				strict(t, path, doc, &claim)
				offered[claim.Name] = claim.Spec
			case "resource.k8s.io/v1 ResourceClaimTemplate":
				var template resourceapi.ResourceClaimTemplate
				strict(t, path, doc, &template)
				offered[template.Name] = template.Spec.Spec
			case "v1 ServiceAccount":
				strict(t, path, doc, &account)
			case "rbac.authorization.k8s.io/v1 ClusterRole":
				strict(t, path, doc, &role)
			case "rbac.authorization.k8s.io/v1 ClusterRoleBinding":
				strict(t, path, doc, &binding)
			case "admissionregistration.k8s.io/v1 ValidatingAdmissionPolicy":
				strict(t, path, doc, &policy)
			case "admissionregistration.k8s.io/v1 ValidatingAdmissionPolicyBinding":
				strict(t, path, doc, &enforced)
			default:
				t.Errorf("%s: there is no check for %s %s", path, kind.APIVersion, kind.Kind)
			}
		}
	}
	driver := newRoot(io.Discard).Flags().Lookup("driver").DefValue
	if len(class.Spec.Selectors) != 1 || class.Spec.Selectors[0].CEL.Expression != `device.driver == "`+driver+`"` {
		t.Errorf("the class is %+v, not of the driver %s", class.Spec, driver)
	}
	if binding.RoleRef.Name != role.Name || binding.Subjects[0].Name != account.Name ||
		binding.Subjects[0].Namespace != account.Namespace {
		t.Errorf("%+v does not join %s and %s", binding, role.Name, account.Name)
	}
	user := `request.userInfo.username == "system:serviceaccount:` + account.Namespace + ":" + account.Name + `"`
	if len(policy.Spec.MatchConditions) != 1 || policy.Spec.MatchConditions[0].Expression != user {
		t.Errorf("the policy is for %+v, not for %s", policy.Spec.MatchConditions, user)
	}
	if !strings.Contains(policy.String(), driver) || enforced.Spec.PolicyName != policy.Name ||
		!slices.Contains(enforced.Spec.ValidationActions, admissionv1.Deny) {
		t.Errorf("%+v does not enforce %s for %s", enforced.Spec, policy.Name, driver)
	}
	if len(claims) == 0 || len(claims) != len(offered) {
		t.Errorf("pods want %v, and there are %v", claims, offered)
	}
	for name := range claims {
		spec, ok := offered[name]
		if !ok || len(spec.Devices.Requests) != 1 || spec.Devices.Requests[0].Exactly.DeviceClassName != class.Name {
			t.Errorf("%s is no claim of the class %s: %+v", name, class.Name, spec)
		}
	}
}

// strict decodes a manifest, and fails the test if it has unknown fields.
func strict(t *testing.T, path, doc string, into any) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(doc), into); err != nil {
		t.Errorf("%s: %v", path, err)
	}
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// checkDaemonSet checks flags, labels and mounts, which the types do not define.
func checkDaemonSet(t *testing.T, set *appsv1.DaemonSet) {
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
	if err != nil || !selector.Matches(labels.Set(set.Spec.Template.Labels)) {
		t.Errorf("%s does not select its own pods: %v", set.Name, err)
	}
	volumes := map[string]string{}
	for _, v := range set.Spec.Template.Spec.Volumes {
		volumes[v.Name] = v.HostPath.Path
	}
	for _, c := range set.Spec.Template.Spec.Containers {
		for _, e := range c.Env {
			t.Setenv(e.Name, cmp.Or(e.Value, "node-1")) // a field of the pod is the node's name
		}
		if _, err := settingsOf(t, c.Args...); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
		for _, m := range c.VolumeMounts {
			if volumes[m.Name] != m.MountPath &&
				m.MountPath != "/host" { // what the kubelet is told must be the node's path
				t.Errorf("%s: %s is at %s, and %s on the node", c.Name, m.Name, m.MountPath, volumes[m.Name])
			}
		}
	}
}

// TestFlagsAreDocumented checks that the table on the page has the command's flags with their defaults.
func TestFlagsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	page := map[string]string{} // by flag: its default
	for _, m := range regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| (.*?) ?\\|").FindAllStringSubmatch(string(text), -1) {
		page[m[1]] = m[2]
	}
	newRoot(io.Discard).Flags().VisitAll(func(f *pflag.Flag) {
		got, ok := page[f.Name]
		delete(page, f.Name)
		if !ok || f.DefValue != "" && got != "`"+f.DefValue+"`" {
			t.Errorf("the page has --%s with the default %s, want `%s`", f.Name, got, f.DefValue)
		}
	})
	if len(page) > 0 {
		t.Errorf("there are no flags %v", slices.Sorted(maps.Keys(page)))
	}
}
