//! NVIDIA's devices, through CUDA.

use crate::gpu::{Adapter, Held};
use cubecl::Device;
use cubecl::cuda::install;

/// The device that CUDA counts as `index`; asking for it makes the connection.
///
/// # Errors
/// The reason, where CUDA has no such device here, or where what compiles its kernels is not installed.
pub fn adapter(index: usize) -> Result<Adapter, String> {
    let device = Device::cuda(index).map_err(|error| error.to_string())?;
    // Without these the first kernel would end the process.
    // SAFETY: it looks whether the library can be loaded, whose initialisation asks nothing of the process.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err("NVIDIA's run-time compiler (libnvrtc) cannot be loaded".into());
    }
    let headers = install::cuda_path().map(|path| path.join("include"));
    if !headers.as_ref().is_some_and(|include| include.join("cuda_runtime.h").is_file()) {
        let place = headers.map_or("CUDA_PATH or /usr/local/cuda".into(), |include| include.display().to_string());
        return Err(format!("CUDA's headers, which its kernels include, are not in {place}"));
    }
    Ok(Adapter::new(&device.client()))
}

/// Memory that the allocator of that device holds now.
///
/// # Errors
/// The reason, where CUDA has no such device here.
pub fn held(index: usize) -> Result<Held, String> {
    Ok(Held::of(&Device::cuda(index).map_err(|error| error.to_string())?.client()))
}
