// Package image knows the bytes of a batch: how they are laid out, what they mean, and which of
// them a part of the batch needs. It does no I/O and takes no memory from a space.
//
//	arrow.RecordBatch ──NewLayout, WriteTo──▶ image ──Open──▶ arrow.RecordBatch
//	DeviceTable ──PlanTable──▶ TablePlan ──PartsOf──▶ Parts   where a table's buffers go in an image
//
// Layout tells the form of the image. What users may know of it is in package convert.
package image
