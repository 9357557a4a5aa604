// Command spillway-device-plugin gives GPU memory to the containers of a Kubernetes node.
package main

func main() {}
