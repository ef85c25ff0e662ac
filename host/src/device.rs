//! The devices of this build.

use crate::error::{Error, Result};
use burn::tensor::Device;

/// The device that `name` names.
///
/// # Errors
/// `device::unavailable`.
pub fn open(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::flex()),
        other => Err(Error::new("device::unavailable", format!("this build of tunehost cannot run on `{other}`"))
            .expected("cpu")
            .help("GPU devices are not built in yet; to try a configuration on the CPU: --set model.device=cpu")),
    }
}
