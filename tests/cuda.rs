//! A build with CUDA on a machine that lacks the device which is asked for.

mod common;

use common::refusals_of_device;
use std::path::Path;

#[test]
fn a_device_that_cuda_does_not_find_is_one_clear_error() {
    // No machine has a hundred; most that test this have none.
    let mut missing = vec!["cuda:99"];
    missing.extend((!Path::new("/dev/nvidiactl").exists()).then_some("cuda:0"));
    for device in missing {
        for said in refusals_of_device(device) {
            let cannot = format!("`{device}` cannot be used: ");
            for part in ["device::unavailable", &cannot, "expected: an NVIDIA GPU", "--device cpu"] {
                assert!(said.contains(part), "{part} is not in\n{said}");
            }
        }
    }
}
